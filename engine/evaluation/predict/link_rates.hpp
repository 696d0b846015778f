// Measured rates of a GPU's memory and of its link to the host: the results of `kvlab bench link`.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace kvlab {

/// The `format` of the JSON that `kvlab bench link` prints.
inline constexpr int kLinkFormat = 1;

/// The time to fetch rows of one size, by the number of rows.
struct FetchCurve {
  struct Point {
    double rows, seconds;
  };
  double row_bytes;
  std::vector<Point> points;  ///< ascending rows and seconds; the first has 0 rows
};

/// Times are those of launches in a captured step.
struct LinkRates {
  std::string device;                ///< name of the GPU
  double read_bytes_per_second = 0;  ///< of device memory
  double copy_bytes_per_second = 0;  ///< of one large copy from pinned host memory to the device
  std::vector<FetchCurve> curves;    ///< ascending row_bytes; at least one

  /// The time of one launch that fetches `rows` scattered rows of `row_bytes` bytes. Interpolates
  /// linearly between the measured numbers of rows and row sizes. Above the largest number of rows,
  /// continues at the rate of the last interval. Smaller rows than measured take as long as rows of
  /// the smallest measured size. Larger rows than measured take as long as the same bytes in rows
  /// of the largest measured size.
  double fetch_seconds(double rows, double row_bytes) const;
};

/// Reads what `kvlab bench link --json` prints. Both throw std::runtime_error, which names the file
/// and the key, for a wrong or missing value.
LinkRates parse_link(const nlohmann::json& json, const std::string& where);
LinkRates read_link_file(const std::string& path);

}  // namespace kvlab

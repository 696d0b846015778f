#include "tests/traces/extra_files.hpp"

#include "traces/base/files.hpp"
#include "traces/manifest.hpp"

namespace kvlab::test {

void make_format_2(const std::filesystem::path& directory) {
  const std::string path = (directory / kManifestFile).string();
  const Manifest manifest = parse_manifest(read_text_file(path, 1'000'000), path);
  write_file_atomically(path, manifest_text(manifest));
}

}  // namespace kvlab::test

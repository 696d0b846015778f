#include "traces/base/output_claim.hpp"

#include <sys/file.h>

namespace kvlab {

OutputClaim::OutputClaim(const std::filesystem::path& path) : place_(path), part_(path) {
  ::flock(part_.descriptor(), LOCK_EX | LOCK_NB);
  place_.reset();
}

}  // namespace kvlab

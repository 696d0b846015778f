// The only code that uses MPI. It is a separate module, which join_process_group() loads if
// necessary.
#define OMPI_SKIP_MPICXX
#include <mpi.h>

#include <limits>
#include <mutex>
#include <numeric>
#include <stdexcept>

#include "sim/processes/process_group.hpp"

namespace kvlab {
namespace {

class MpiGroup final : public ProcessGroup {
 public:
  MpiGroup() {
    int provided = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided);
    if (provided < MPI_THREAD_SERIALIZED)
      throw std::runtime_error(
          "this MPI does not support calls from several threads; use one that is built with thread "
          "support");
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
    MPI_Comm host;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &host);
    MPI_Comm_rank(host, &host_rank_);
    MPI_Comm_size(host, &host_size_);
    MPI_Comm_free(&host);
  }
  /// Does not call MPI_Finalize after abort(), because mpirun ends the other processes when one
  /// process ends without MPI_Finalize.
  ~MpiGroup() override {
    if (!aborted_) MPI_Finalize();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int host_rank() const override { return host_rank_; }
  int host_size() const override { return host_size_; }

  std::vector<std::string> exchange(const std::string& text) override {
    const std::lock_guard lock(mutex_);
    const int length = length_of(text);
    std::vector<int> lengths(static_cast<std::size_t>(size_)), starts(lengths.size());
    MPI_Allgather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, MPI_COMM_WORLD);
    std::exclusive_scan(lengths.begin(), lengths.end(), starts.begin(), 0);
    std::string all(static_cast<std::size_t>(starts.back() + lengths.back()), '\0');
    MPI_Allgatherv(text.data(), length, MPI_CHAR, all.data(), lengths.data(), starts.data(),
                   MPI_CHAR, MPI_COMM_WORLD);
    std::vector<std::string> texts;
    for (std::size_t i = 0; i < lengths.size(); ++i)
      texts.push_back(
          all.substr(static_cast<std::size_t>(starts[i]), static_cast<std::size_t>(lengths[i])));
    return texts;
  }

  void send(int to, const std::string& bytes) override {
    const std::lock_guard lock(mutex_);
    MPI_Send(bytes.data(), length_of(bytes), MPI_BYTE, to, 0, MPI_COMM_WORLD);
  }

  std::optional<Message> poll() override {
    const std::lock_guard lock(mutex_);
    int found = 0, length = 0;
    MPI_Message handle;
    MPI_Status status;
    MPI_Improbe(MPI_ANY_SOURCE, 0, MPI_COMM_WORLD, &found, &handle, &status);
    if (!found) return std::nullopt;
    MPI_Get_count(&status, MPI_BYTE, &length);
    Message message{status.MPI_SOURCE, std::string(static_cast<std::size_t>(length), '\0')};
    MPI_Mrecv(message.bytes.data(), length, MPI_BYTE, &handle, MPI_STATUS_IGNORE);
    return message;
  }

  void abort() override { aborted_ = true; }

 private:
  static int length_of(const std::string& bytes) {
    if (bytes.size() > static_cast<std::size_t>(std::numeric_limits<int>::max()))
      throw std::runtime_error("a message is larger than 2 GiB; use fewer configurations");
    return static_cast<int>(bytes.size());
  }

  std::mutex mutex_;  // only one thread at a time may call MPI
  int rank_ = 0, size_ = 1, host_rank_ = 0, host_size_ = 1;
  bool aborted_ = false;
};

}  // namespace
}  // namespace kvlab

/// The group of this process; the caller deletes it.
extern "C" kvlab::ProcessGroup* kvlab_join_mpi() { return new kvlab::MpiGroup; }

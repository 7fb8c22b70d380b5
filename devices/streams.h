// Streams of their own for work that should overlap with other work on the same GPUs.
//
// A GPU runs what is queued on one stream in order. Where a model is split over GPUs, one batch keeps one GPU busy at a
// time; several batches keep all of them busy, if each has streams of its own. Devices without streams (the CPU,
// simulated devices) finish every operator before it returns, and a set for them is empty.
#pragma once

#include <c10/core/Stream.h>

#include <vector>

namespace emend::devices {

/// A stream for every GPU among `devices`: that of lane number `lane`, which lives as long as the process, because
/// memory blocks and cuBLAS workspaces belong to the stream that first used them and would pile up with new ones. They
/// begin after what is queued on the current streams now; what is queued on the then current streams after the set's
/// end waits for them, so that weights may be changed. One lane alone needs none of them: it uses the current streams.
/// Use: `const c10::MultiStreamGuard guard(set.streams());`
class StreamSet {
 public:
  StreamSet(const std::vector<c10::Device>& devices, int lane);
  ~StreamSet();
  StreamSet(StreamSet&&) noexcept = default;
  StreamSet(const StreamSet&) = delete;
  StreamSet& operator=(const StreamSet&) = delete;
  StreamSet& operator=(StreamSet&&) = delete;

  [[nodiscard]] const std::vector<c10::Stream>& streams() const noexcept { return streams_; }

 private:
  std::vector<c10::Stream> streams_;
};

}  // namespace emend::devices

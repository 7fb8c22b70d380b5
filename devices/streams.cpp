#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <emend/devices/streams.h>

#include <set>

namespace emend::devices {
namespace {

// Work queued on `later` from now on waits for what is queued on `earlier`.
void order(const c10::Stream& earlier, const c10::Stream& later) {
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

c10::Stream current(const c10::Stream& stream) {
  return c10::impl::VirtualGuardImpl(stream.device_type()).getStream(stream.device());
}

}  // namespace

StreamSet::StreamSet(const std::vector<c10::Device>& devices) {
  std::set<c10::DeviceIndex> seen;
  for (const auto& device : devices) {
    if (!device.is_cuda() || !seen.insert(device.index()).second) continue;
    streams_.push_back(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
    order(current(streams_.back()), streams_.back());
  }
}

StreamSet::~StreamSet() {
  for (const auto& stream : streams_) {
    try {
      order(stream, current(stream));
    } catch (const c10::Error&) {  // the GPU has failed; the next use of it says so
    }
  }
}

}  // namespace emend::devices

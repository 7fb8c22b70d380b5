#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <emend/devices/streams.h>

#include <map>
#include <mutex>
#include <set>
#include <tuple>

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

struct ByIndex {
  bool operator()(c10::Device a, c10::Device b) const { return a.index() < b.index(); }
};

c10::Stream stream_of(c10::Device device, int lane) {
  static std::mutex mutex;
  static auto* kept = new std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, int>, c10::Stream>;
  const std::lock_guard lock(mutex);
  const auto key = std::make_tuple(device.type(), device.index(), lane);
  auto found = kept->find(key);
  if (found == kept->end())
    found = kept->emplace(key, c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)).first;
  return found->second;
}

}  // namespace

StreamSet::StreamSet(const std::vector<c10::Device>& devices, int lane) {
  for (const auto& device : std::set<c10::Device, ByIndex>(devices.begin(), devices.end())) {
    if (device.is_cpu()) continue;
    streams_.push_back(stream_of(device, lane));
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

// Memory of tensors on the host, in a process that makes and drops them for hours.
#pragma once

namespace emend::devices {

/// From here on tensors on the CPU lie in memory of malloc, 64-byte aligned as LibTorch's own are. LibTorch asks for
/// aligned memory, and glibc before 2.38 cuts that out of a larger piece: what is dropped is too small for the next
/// tensor of that size (glibc bug 14581), holes pile up, and after an hour of edits half the time went into looking
/// through them. For programs, as they start; a library leaves the allocator of a process to its owner. Tensors that
/// exist already stay valid. Further calls do nothing; not thread-safe.
void reuse_host_memory();

}  // namespace emend::devices

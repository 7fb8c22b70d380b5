// Memory of tensors on the host, in a process that makes and drops them for hours.
#pragma once

namespace emend::devices {

/// From here on tensors on the CPU lie in memory of malloc, 64-byte aligned as LibTorch's own are. LibTorch asks for
/// aligned memory, and glibc before 2.38 cuts that out of a larger piece: what is dropped is too small for the next
/// tensor of that size (glibc bug 14581), and holes pile up that every later request looks through. For programs, as
/// they start; a library leaves the allocator of a process to its owner. Tensors that exist already stay valid. May be
/// called again; not thread-safe.
void reuse_host_memory();

/// Gives free pages of the heap back to the system, where malloc is glibc's. A batch leaves the heap full of holes
/// between what stays, as measuring between batches does, and glibc keeps them: a sequence would grow batch by batch.
void return_host_memory();

}  // namespace emend::devices

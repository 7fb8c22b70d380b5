// Memory of tensors on the host, in a process that makes and drops them for hours.
#pragma once

namespace emend::devices {

/// From here on tensors on the CPU, 64-byte aligned as LibTorch's own are, lie in memory of malloc, and those above
/// 128 KiB, up to 64 MiB, in mapped blocks of eight sizes to a power of two, which the next tensor of about that size
/// takes over. LibTorch asks for aligned memory, and glibc before 2.38 cuts that out of a larger piece: what is dropped
/// is too small for the next tensor of that size (glibc bug 14581), and holes pile up that every later request looks
/// through. Idle blocks take a sixteenth of the machine's memory at most, and no more than tensors had needed at the
/// same time. For programs, as they start; a library leaves the allocator of a process to its owner. Tensors that exist
/// already stay valid. May be called again; not thread-safe itself, what it sets is.
void reuse_host_memory();

/// Gives idle blocks back to the system, and free pages of the heap where malloc is glibc's. A batch leaves the heap
/// full of holes between what stays, as measuring between batches does, and glibc keeps them: a sequence would grow
/// batch by batch. Thread-safe.
void return_host_memory();

}  // namespace emend::devices

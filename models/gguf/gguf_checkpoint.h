// Opens a GGUF file as a checkpoint: the configuration, the tensor names and the layouts are those of the Hugging Face
// checkpoint that the file was converted from, so that one family description serves both.
//
// Goals: every change that llama.cpp's converter makes is undone (rotary row order, Gemma's 1 + w, GPT-2's transposed
// matrices, fused and split projections); quantised tensors are dequantised on demand; a hostile file costs bounded
// time and memory and ends in an Error. Non-goals: computing on quantised weights, multimodal and adapter files.
//
// docs/formats/gguf.md lists the architectures, the key names and what cannot be recovered.
#pragma once

#include <emend/models/checkpoint.h>

namespace emend::models {

/// Opens `path` (for a model in several files: the first one, named …-00001-of-000NN.gguf).
/// read() gives float32, float16 and bfloat16 tensors in their own dtype, as copies that may be edited in place;
/// every quantised type becomes float32. `family` is one that is not in families.def (it must outlive the checkpoint);
/// null: those that are. Safe to use from several threads. Throws Error(kNotFound) if a file is missing;
/// Error(kCorruption) for a damaged or self-contradictory file, naming the key or tensor; Error(kUnsupported) for an
/// architecture or a tensor type that emend does not know.
[[nodiscard]] std::shared_ptr<const Checkpoint> open_gguf_checkpoint(const std::filesystem::path& path,
                                                                     const FamilySpec* family = nullptr);

}  // namespace emend::models

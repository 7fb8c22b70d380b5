// model.safetensors.index.json: which file holds which tensor. Names must not lead out of the folder.
#include <ATen/ATen.h>
#include <emend/core/safetensors.h>
#include <emend/models/checkpoint.h>

#include "fuzz.h"

namespace emend::fuzz {
namespace {

const Folder& folder() {
  static const Folder made("index");
  return made;
}

}  // namespace

EMEND_FUZZ_TARGET(index) {
  static const bool ready = [] {
    folder().write("config.json", R"({"model_type": "llama"})");
    write_safetensors(folder().path() / "a.safetensors", {{"x", at::ones({2})}, {"y", at::ones({3})}});
    write_safetensors(folder().path() / "b.safetensors", {{"z", at::ones({1})}});
    return true;
  }();
  (void)ready;
  folder().write("model.safetensors.index.json", input);
  expect_error_or_success([&] {
    const auto opened = models::open_checkpoint(folder().path().string());
    if (opened->tensors().size() > 3) std::abort();
    for (const auto& info : opened->tensors()) (void)opened->read(info.name).sum();
  });
}

}  // namespace emend::fuzz

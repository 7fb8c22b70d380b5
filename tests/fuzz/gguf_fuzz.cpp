// A GGUF file as a checkpoint: metadata, table of tensors, small tensors dequantised, vocabulary.
#include <ATen/ATen.h>
#include <emend/models/config.h>
#include <emend/models/gguf/gguf_checkpoint.h>
#include <emend/models/gguf/gguf_file.h>
#include <emend/models/tokenizer/tokenizer.h>

#include "fuzz.h"

namespace emend::fuzz {

EMEND_FUZZ_TARGET(gguf) {
  const MemoryFile file(input);
  expect_error_or_success([&] { (void)models::GgufFile(file.path()); });
  std::shared_ptr<const models::Checkpoint> opened;
  expect_error_or_success([&] { opened = models::open_gguf_checkpoint(file.path()); });
  if (!opened) return;
  expect_error_or_success([&] { (void)models::parse_config(opened->config(), "fuzz"); });
  for (const auto& info : opened->tensors())
    expect_error_or_success([&] {
      int64_t values = 1;
      for (const int64_t n : info.shape) values *= n;
      if (values <= 1 << 20) (void)opened->read(info.name).sum();
    });
  expect_error_or_success([&] {
    if (const auto tokenizer = opened->load_tokenizer())
      (void)tokenizer->decode(tokenizer->encode_ids("Hello, w\xC3\xB6rld 12", true));
  });
}

}  // namespace emend::fuzz

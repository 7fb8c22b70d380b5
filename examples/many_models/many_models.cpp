// Several models in one process, each on its own devices and in its own dtype, used from several threads. No state is
// shared: an edit of one does not reach the others.
//
//   many_models MODEL HPARAMS
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/models/placing.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <emend/workflow/session.h>

#include <iostream>
#include <thread>

namespace {

namespace datasets = emend::datasets;
namespace models = emend::models;
using emend::Error;

at::Tensor last_logits(const models::Model& model) {
  at::NoGradGuard no_gradients;  // a setting of the thread
  const auto ids = model.tokenizer().encode_ids("The Eiffel Tower is in the city of");
  return model.forward(models::TokenBatch::from_rows({ids})).logits[-1].to(at::kFloat).cpu();
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 3) return std::cerr << "usage: many_models MODEL HPARAMS\n", 2;
  const auto checkpoint = models::open_checkpoint(argv[1]);  // opened once: the files are mapped, not copied
  auto edited = models::load_placed(checkpoint);
  const auto half = models::load_placed(checkpoint, {.dtype = at::kBFloat16});
  const auto split = models::load_placed(checkpoint, {.device_map = "sim:2"});  // two simulated devices
  const auto before = last_logits(edited), half_before = last_logits(half);
  std::cout << "one device and two agree: " << at::equal(before, last_logits(split)) << "\n";

  // Edit one, and ask another at the same time.
  at::Tensor meanwhile;
  std::thread asking([&] { meanwhile = last_logits(half); });
  datasets::Fact fact;
  fact.prompt = "{} is in the city of";
  fact.subject = "The Eiffel Tower";
  fact.target_new = "Rome";
  emend::workflow::Session session(edited, {.editor = "rome", .hparams = argv[2]});
  session.edit({&fact, 1});
  asking.join();

  const bool apart = at::equal(meanwhile, half_before) && at::equal(before, last_logits(split));
  const bool changed = !at::equal(before, last_logits(edited));
  std::cout << "the edited model changed: " << changed << ", the others did not: " << apart << "\n";
  return changed && apart ? 0 : 1;
} catch (const Error& error) {
  std::cerr << error.what() << "\n";
  return exit_code(error.error_class());
}

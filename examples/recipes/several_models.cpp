// Several models in one program, each on its own devices and in its own dtype: one is edited while another is asked.
#include <thread>

#include "recipe.h"

void several_models(const std::string& model_path, const std::string& hparams) {
  using namespace emend;
  const auto checkpoint = models::open_checkpoint(model_path);  // opened once: the files are mapped, not copied
  auto edited = models::load_placed(checkpoint);
  const auto half = models::load_placed(checkpoint, {.dtype = at::kBFloat16});
  const auto split = models::load_placed(checkpoint, {.device_map = "sim:2"});  // two simulated devices
  const auto ask = [](const models::Model& model) {
    const at::NoGradGuard no_gradients;  // a setting of the thread
    return model.trace("The Eiffel Tower is in the city of").logits.to(at::kFloat).cpu();
  };
  const at::Tensor before = ask(edited), half_before = ask(half);
  std::cout << "one device and two agree: " << at::equal(before, ask(split)) << "\n";

  at::Tensor meanwhile;
  std::thread asking([&] { meanwhile = ask(half); });
  datasets::Fact fact;
  fact.prompt = "{} is in the city of";
  fact.subject = "The Eiffel Tower";
  fact.target_new = "Rome";
  workflow::Session session(edited, {.editor = "rome", .hparams = hparams});
  session.edit({&fact, 1});
  asking.join();
  std::cout << "the edited model changed: " << !at::equal(before, ask(edited))
            << ", the others did not: " << (at::equal(meanwhile, half_before) && at::equal(before, ask(split))) << "\n";
}

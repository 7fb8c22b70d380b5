// Loads a model, edits facts into it, evaluates before and after, saves. Ctrl-C ends it with the model untouched.
//
//   edit_facts MODEL FACTS HPARAMS OUT_FOLDER [DEVICE_MAP]
#include <emend/core/error.h>
#include <emend/editors/session.h>
#include <emend/evaluation/evaluation.h>
#include <emend/models/placing.h>

#include <csignal>
#include <iostream>

namespace {
volatile std::sig_atomic_t interrupted = 0;
}

int main(int argc, char** argv) try {
  using namespace emend;
  if (argc < 5) return std::cerr << "usage: edit_facts MODEL FACTS HPARAMS OUT_FOLDER [DEVICE_MAP]\n", 2;
  std::signal(SIGINT, [](int) { interrupted = 1; });

  auto model = models::load_placed(argv[1], {.device_map = argc > 5 ? argv[5] : "cpu"});
  const auto facts = datasets::load_facts(argv[2]);
  const auto before = evaluation::evaluate(model, facts, {"auto"});

  editors::Session session(model, "memit", {.hparams = argv[3], .progress = [](const ProgressUpdate& step) {
                                              std::cerr << step.phase << " " << step.done << "/" << step.total << "\n";
                                              return !interrupted;  // false: stop here, with the model as it was
                                            }});
  session.edit(facts.facts);

  evaluation::EvaluateOptions options;
  options.before = &before;
  const auto after = evaluation::evaluate(model, session.asked(facts), {"auto"}, options);
  std::cout << "before: " << before.summary.dump() << "\nafter:  " << after.summary.dump() << "\n";
  session.save_pack(std::string(argv[4]) + "/edit.safetensors");
  models::save_model(model, std::string(argv[4]) + "/model");
  std::cout << "edited " << facts.facts.size() - session.failed() << " facts\n";
  return 0;
} catch (const emend::Error& error) {
  std::cerr << error.what() << "\n";
  return emend::exit_code(error.error_class());
}

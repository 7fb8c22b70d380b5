// Edits facts into a model, judges it before and after, saves and reports. Ctrl-C ends it with the model untouched; the
// same command takes the run up again.
//
//   edit_facts MODEL FACTS HPARAMS OUT_FOLDER [DEVICE_MAP]
#include <emend/core/error.h>
#include <emend/models/placing.h>
#include <emend/workflow/run.h>

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
  workflow::Run run(model, datasets::load_facts(argv[2]),
                {.hparams = argv[3], .batch_size = 1, .out = argv[4], .save = {"pack", "model"}, .resume = true},
                {.progress = workflow::stopping([](const ProgressUpdate&) { return !interrupted; })});
  run.execute();
  std::cout << run.summary();
  std::cout << "edited " << run.results()["edits"]["applied"] << " facts\n";
  return 0;
} catch (const emend::Error& error) {
  std::cerr << error.what() << "\n";
  return emend::exit_code(error.error_class());
}

#include "benchmarks.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <emend/devices/kernels.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <emend/editors/steps/keys.h>
#include <emend/editors/steps/solver.h>
#include <emend/editors/steps/statistics.h>
#include <emend/editors/steps/targets.h>
#include <emend/models/products.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <random>
#include <thread>

namespace emend::tools {
namespace {

using nlohmann::ordered_json;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Of products as LibTorch makes them by default, or as the models make them.
double gemm_peak(at::ScalarType dtype, c10::Device device, int64_t size, bool as_models) {
  const devices::PlainOperators plain(!as_models);
  const auto make = [&] {
    return devices::route_to(at::rand({size, size}, at::kFloat).to(dtype), device, devices::Purpose::kOther);
  };
  const at::Tensor a = make(), b = make();
  double best = 0;
  for (int i = 0; i < 8; ++i) {
    const double begin = now();
    const at::Tensor product = models::product(a, b);
    (void)product[0][0].item();  // waits for the device
    best = std::max(best, 2e-9 * static_cast<double>(size * size * size) / (now() - begin));
  }
  return best;
}

double load() {
  double one = 0;
  std::ifstream("/proc/loadavg") >> one;
  return one;
}

// Means; lengths differ by up to as much less one, as those of real facts do.
constexpr int64_t kContexts = 6, kContextTokens = 9, kSubjectTokens = 3, kPromptTokens = 4, kAnswerTokens = 2;

class SyntheticBench {
 public:
  SyntheticBench(const models::Model& model, const SyntheticOptions& options, const Common& common,
                 const ordered_json& machine)
      : model_(model), options_(options), common_(common), random_(options.seed) {
    for (const char* dtype : {"float32", "bfloat16"}) peaks_[dtype] = machine["gemm_peak_gflops"][dtype];
    own_peak_ = peaks_[model.dtype() == at::kBFloat16 ? "bfloat16" : "float32"];
    // The layers that `emend plan` assumes: five in the first third.
    const int first = model.n_layers() / 6;
    for (int l = first; l < std::min(model.n_layers(), first + 5); ++l) layers_.push_back(l);
    spec_.sites = {{hooks::Site::kLayerOut, layers_.back()}};
    spec_.loss_layer = model.n_layers() - 1;
    spec_.steps = options.steps;
    spec_.stop_loss = 0;
  }

  ordered_json run() {
    ordered_json phases;
    if (options_.targets) targets(phases), keys(phases);
    if (options_.statistics) statistics(phases);
    if (options_.targets) insertion(phases);
    ordered_json document = {{"layers", layers_}, {"steps", options_.steps}, {"phases", std::move(phases)}};
    if (!options_.growth.empty()) document["growth"] = growth();
    return document;
  }

 private:
  std::vector<int64_t> tokens(int64_t n) {
    std::vector<int64_t> ids;
    for (int64_t t = 0; t < n; ++t)
      ids.push_back(static_cast<int64_t>(random_() % static_cast<uint64_t>(model_.vocab_size())));
    return ids;
  }

  int64_t about(int64_t mean) { return 1 + static_cast<int64_t>(random_() % static_cast<uint64_t>(2 * mean - 1)); }

  // Some facts stop early: after half of the steps at the soonest.
  std::vector<editors::TargetProblem> problems(int64_t n) {
    std::vector<std::vector<int64_t>> contexts(1);  // the first one is empty
    while (std::ssize(contexts) < kContexts) contexts.push_back(tokens(about(kContextTokens)));
    std::vector<editors::TargetProblem> all;
    for (int64_t i = 0; i < n; ++i) {
      editors::TargetProblem problem;
      problem.case_id = i;
      problem.more_steps = -static_cast<int>(random_() % static_cast<uint64_t>(options_.steps / 2 + 1));
      const auto subject = tokens(about(kSubjectTokens)), prompt = tokens(about(kPromptTokens)),
                 answer = tokens(about(kAnswerTokens));
      for (const auto& context : contexts) {
        editors::TargetRow row;
        row.ids = context;
        row.ids.insert(row.ids.end(), subject.begin(), subject.end());
        row.lookup = std::ssize(row.ids) - 1;
        row.ids.insert(row.ids.end(), prompt.begin(), prompt.end());
        for (int64_t t = 0; t < std::ssize(answer); ++t)
          row.labels.emplace_back(std::ssize(row.ids) - 1 + t, answer[t]);
        row.ids.insert(row.ids.end(), answer.begin(), answer.end() - 1);
        row.weight = 1.0 / static_cast<double>(kContexts);
        problem.rows.push_back(std::move(row));
      }
      problem.kl_rows.push_back({subject, std::ssize(subject) - 1, {}, 0, false});
      all.push_back(std::move(problem));
    }
    return all;
  }

  Measure optimise(const std::vector<editors::TargetProblem>& problems, editors::Engine engine,
                   const editors::EditSettings& compute) {
    const editors::EditContext context{{.engine = engine, .compute_dtype = compute.compute_dtype, .tf32 = compute.tf32},
                                       {.cancel = common_.cancel, .progress = common_.progress, .log = common_.log}};
    return measured(model_, [&] { (void)editors::optimise_targets(model_, problems, spec_, context); });
  }

  void targets(ordered_json& phases) {
    const auto all = problems(options_.facts);
    Measure reference;
    if (options_.reference_facts > 0) {
      const auto some = std::min<size_t>(static_cast<size_t>(options_.reference_facts), all.size());
      reference = optimise({all.begin(), all.begin() + some}, editors::Engine::kReference, {});
      const double scale = static_cast<double>(all.size()) / static_cast<double>(some);
      reference.seconds *= scale;
      reference.gflop *= scale;
    }
    const Measure fast = optimise(all, editors::Engine::kFast, {});
    phases["targets"] = phase_document(reference, fast, own_peak_, options_.facts);
    if (options_.reference_facts > 0 && options_.reference_facts < options_.facts)
      phases["targets"]["reference_measured_on"] = options_.reference_facts;
    const auto& compute = options_.compute;
    if (compute.plain_arithmetic(model_)) return;
    const Measure narrow = optimise(all, editors::Engine::kFast, compute);
    const double peak = peaks_[compute.compute_dtype == at::kBFloat16 ? "bfloat16" : "float32"];
    phases["targets_" + compute.arithmetic_name(model_)] = phase_document(reference, narrow, peak, options_.facts);
  }

  // Those of one layer, of all rows.
  void keys(ordered_json& phases) {
    std::vector<editors::PromptRow> rows;
    for (const auto& problem : problems(options_.facts))
      for (const auto& row : problem.rows) rows.push_back({{}, row.ids, row.lookup, {}});
    phases["keys"] = phase_document(
        {},
        measured(model_,
                 [&] {
                   (void)editors::collect_at_lookup(model_, rows, {{hooks::Site::kMlpDownIn, layers_.back()}}, {});
                 }),
        own_peak_, options_.facts);
    phases["keys"]["layers"] = 1;
  }

  void statistics(ordered_json& phases) {
    std::vector<std::vector<int64_t>> rows;
    for (int64_t left = options_.statistics_tokens; left > 0; left -= std::ssize(rows.back()))
      rows.push_back(tokens(std::min<int64_t>({left, 256, model_.max_positions()})));
    const Measure fast = measured(model_, [&] { (void)editors::collect_second_moments(model_, rows, layers_, {}); });
    phases["statistics"] = phase_document({}, fast, own_peak_);
    phases["statistics"]["tokens"] = options_.statistics_tokens;
  }

  // The system of one layer: keys of so many facts beside a well-conditioned second moment.
  Measure solve(int64_t facts, editors::SolveReport* report) {
    const int64_t width = model_.edit_site(layers_.back()).in_features;
    auto generator = at::make_generator<at::CPUGeneratorImpl>(options_.seed);
    const at::Tensor home = model_.weight(model_.edit_site(layers_.back()).weight_name);
    const auto make = [&](int64_t columns) {
      return devices::route_like(at::randn({width, columns}, generator, at::kDouble), home, devices::Purpose::kSolve);
    };
    at::Tensor cov_FF = make(64);
    cov_FF = cov_FF.mm(cov_FF.t());
    cov_FF.diagonal().add_(1);
    const at::Tensor keys_FE = make(facts);
    editors::Preserved preserved;
    preserved.moment = editors::SecondMoment(devices::to_host(cov_FF), 10 * width);
    preserved.lambda = 15000;
    return measured(model_, [&] { (void)editors::solve_keys(keys_FE, preserved, {}, report); });
  }

  void insertion(ordered_json& phases) {
    if (model_.edit_site(layers_.back()).in_features > options_.solve_width) return;
    editors::SolveReport report;
    const Measure first = solve(options_.facts, &report);
    phases["solve"] = phase_document({}, first, own_peak_, options_.facts);
    phases["solve"]["method"] = report.method;
    phases["solve"]["layers"] = 1;
  }

  ordered_json growth() {
    auto rows = ordered_json::array();
    for (const int64_t facts : options_.growth) {
      const Measure targets = optimise(problems(facts), editors::Engine::kFast, options_.compute);
      ordered_json row = {{"facts", facts},
                          {"targets_s", targets.seconds},
                          {"targets_s_per_fact", targets.seconds / static_cast<double>(facts)}};
      if (model_.edit_site(layers_.back()).in_features <= options_.solve_width)
        row["solve_s_a_layer"] = solve(facts, nullptr).seconds;
      row["peak_bytes"] = targets.peak_bytes;
      rows.push_back(std::move(row));
    }
    return rows;
  }

  const models::Model& model_;
  const SyntheticOptions& options_;
  const Common& common_;
  std::mt19937_64 random_;
  std::map<std::string, double> peaks_;
  double own_peak_ = 1;
  std::vector<int> layers_;
  editors::TargetSpec spec_;
};

}  // namespace

Measure measured(const models::Model& model, const std::function<void()>& work) {
  devices::reset_peak_memory(c10::Device(c10::kCPU));
  for (const auto device : model.placement().devices())
    if (!device.is_cpu()) devices::reset_peak_memory(device);
  const int64_t flops = models::linear_flops();
  const double begin = now();
  work();
  return {now() - begin, 1e-9 * static_cast<double>(models::linear_flops() - flops), workflow::peak_bytes(model)};
}

ordered_json describe_machine(const models::Model& model) {
  const c10::Device device = model.placement().layers.front();
  const int64_t size = device.is_cuda() ? 8192 : 1536;
  const double plain = gemm_peak(at::kFloat, device, size, false), best = gemm_peak(at::kFloat, device, size, true);
  return {{"cpu", devices::visible_devices().front().name},
          {"cores", static_cast<int64_t>(std::thread::hardware_concurrency())},
          {"threads", at::get_num_threads()},
          {"load", load()},
          {"device", devices::to_string(device)},
          {"gemm_peak_gflops",
           {{"float32", std::max(plain, best)},
            {"float32_libtorch", plain},
            {"bfloat16", gemm_peak(at::kBFloat16, device, size, true)}}}};
}

ordered_json phase_document(const Measure& reference, const Measure& fast, double peak, int64_t facts) {
  ordered_json document;
  if (reference.seconds > 0) document["reference_s"] = reference.seconds;
  document["fast_s"] = fast.seconds;
  if (fast.seconds <= 0) return document;
  if (reference.seconds > 0) document["ratio"] = reference.seconds / fast.seconds;
  if (facts > 0) document["facts_per_second"] = static_cast<double>(facts) / fast.seconds;
  if (fast.gflop > 0) {
    document["gflop"] = fast.gflop;
    if (reference.gflop > 0) document["reference_gflop"] = reference.gflop;
    document["fraction_of_peak"] = fast.gflop / fast.seconds / peak;
  }
  if (!fast.peak_bytes.is_null()) document["peak_bytes"] = fast.peak_bytes;
  return document;
}

ordered_json bench_synthetic(const models::Model& model, const SyntheticOptions& options, const Common& common,
                             const ordered_json& machine) {
  return SyntheticBench(model, options, common, machine).run();
}

}  // namespace emend::tools

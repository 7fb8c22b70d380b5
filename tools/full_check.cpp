#include "benchmarks.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/devices/doctor.h>
#include <emend/devices/kernels.h>
#include <emend/devices/route.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/solver.h>
#include <emend/hparams/raw.h>
#include <emend/models/family.h>
#include <emend/models/published_shapes.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <chrono>
#include <cmath>

namespace emend::tools {
namespace {

using devices::Check;
using devices::CheckStatus;
using nlohmann::ordered_json;
using Changes = std::map<std::string, at::Tensor>;  // ΔW by weight, float64 on the host

const c10::Device kHost(c10::kCPU);

// Every byte is a token.
class ByteTokenizer final : public models::Tokenizer {
 public:
  ByteTokenizer() { fingerprint_ = "bytes"; }
  [[nodiscard]] models::Encoding encode(std::string_view text, bool) const override {
    models::Encoding out;
    for (size_t i = 0; i < text.size(); ++i) {
      out.ids.push_back(static_cast<unsigned char>(text[i]));
      out.offsets.emplace_back(i, i + 1);
    }
    return out;
  }
  [[nodiscard]] std::string decode(std::span<const int64_t> ids, bool) const override {
    std::string text;
    for (const int64_t id : ids) text += token_text(id);
    return text;
  }
  [[nodiscard]] std::string token_text(int64_t id) const override {
    return std::string(1, id >= ' ' && id < 127 ? static_cast<char>(id) : '?');
  }
  [[nodiscard]] std::string token_bytes(int64_t id, bool) const override { return token_text(id); }
  [[nodiscard]] std::optional<int64_t> token_id(std::string_view) const override { return std::nullopt; }
  [[nodiscard]] bool is_special(int64_t) const override { return false; }
  [[nodiscard]] int64_t vocab_size() const override { return 256; }
  void save(const std::filesystem::path&) const override {}
};

// An editor with how far its ΔW may be from the CPU's, relative to ‖ΔW‖, in float64, float32 and bfloat16. On a CPU
// float32 is 3e-6 from float64 at most, bfloat16 0.01 (LoRA 0.09: Adam's first steps go by the signs of the gradient,
// and rounding turns those that are next to zero).
struct Method {
  const char *name, *layers, *hparams;
  double limits[3];
};
constexpr const char* kLocate =
    "clamp_norm_factor: 2\nfact_token: subject_last\nv_num_grad_steps: 4\nv_lr: 0.5\n"
    "v_weight_decay: 0.01\nkl_factor: 0.0625\nmom2_adjustment: true\nmom2_update_weight: 5\n";
constexpr const char* kLora =
    "lora_type: lora\nrank: 2\nlora_alpha: 4\nlora_dropout: 0\nnum_steps: 2\nlr: 0.01\ntarget_modules: [all-linear]\n";
constexpr Method kMethods[] = {{"rome", "layers: [1]\n", kLocate, {1e-9, 1e-4, 0.1}},
                               {"memit", "layers: [0, 1]\n", kLocate, {1e-9, 1e-4, 0.1}},
                               {"lora", "layers: []\n", kLora, {1e-9, 1e-4, 0.3}}};
constexpr at::ScalarType kDtypes[] = {at::kDouble, at::kFloat, at::kBFloat16};
constexpr const char* kDtypeNames[] = {"float64", "float32", "bfloat16"};

struct Placed {
  std::string kind;  // "on one device"
  std::vector<c10::Device> devices;
};

std::vector<Placed> placements(const std::vector<c10::Device>& gpus) {
  std::vector<Placed> all = {{"on the CPU", {kHost}}};
  for (const auto gpu : gpus) all.push_back({"on one device", {gpu}});
  for (size_t i = 0; i < gpus.size(); ++i)
    for (size_t j = i + 1; j < gpus.size(); ++j) all.push_back({"on two devices", {gpus[i], gpus[j]}});
  for (const auto gpu : gpus) all.push_back({"on the CPU and a device", {kHost, gpu}});
  if (gpus.size() > 2) all.push_back({"on all devices", gpus});
  return all;
}

class FullCheck {
 public:
  FullCheck(const ModelOptions& options, const Common& common) : options_(options), common_(common) {}

  int run() {
    look_and_copy();
    for (const auto& placed : placements(gpus_)) edit_on(placed);
    time(kHost);
    compare_kernels(kHost);
    for (const auto gpu : gpus_) time(gpu), compare_kernels(gpu);
    bool ok = true;
    for (const auto& check : checks_) ok = ok && check.status != CheckStatus::kFailed;
    common_.print(document(ok), text(ok));
    return ok ? 0 : exit_code(ErrorClass::kDevice);
  }

 private:
  void look_and_copy() {
    const auto map = devices::parse_device_map(options_.device_map);
    devices::MaxMemory limits;
    if (!options_.max_memory.empty()) limits = devices::parse_max_memory(options_.max_memory, map.numbered());
    checks_ = devices::check_machine(map, limits);
    for (auto& check : checks_) {
      if (check.name == "cuda runtime" && check.status == CheckStatus::kWarning) {
        const auto& cuda = devices::load_cuda_runtime();
        const bool hidden = cuda.reason.starts_with("CUDA_VISIBLE_DEVICES");
        check.status = cuda.driver && !hidden ? CheckStatus::kFailed : CheckStatus::kSkipped;
      }
      if (check.name == "device map") return;  // which is there only when it cannot be used
    }
    machine_ = devices::prepare_devices(map, limits);
    for (const auto& info : machine_)
      if (!info.device.is_cpu()) gpus_.push_back(info.device);
    n_layers_ = std::max<int64_t>(4, std::ssize(gpus_));
  }

  // The first flavour of the llama family, its layers shared out in order.
  [[nodiscard]] models::Model tiny_model(const std::vector<c10::Device>& where, at::ScalarType dtype) const {
    auto config = nlohmann::json::parse(models::family_named("llama").debug.front().config);
    config["vocab_size"] = 256;
    config["num_hidden_layers"] = n_layers_;
    models::LoadOptions load;
    load.dtype = dtype;
    load.place = [&](const models::ModelConfig& parsed, const models::Checkpoint&) {
      auto plan = devices::PlacementPlan::single(where.front(), n_layers_);
      for (int64_t l = 0; l < n_layers_; ++l) plan.layers[l] = where[l * std::ssize(where) / n_layers_];
      plan.final_norm = plan.head = where.back();
      plan.tied_copy = parsed.tied_head && plan.head != plan.embedding;
      return plan;
    };
    return models::load_model(models::with_tokenizer(models::random_weights(config, "tiny", 1),
                                                     [] { return std::make_unique<ByteTokenizer>(); }),
                              load);
  }

  [[nodiscard]] Changes edit(const Method& method, const std::vector<c10::Device>& where, at::ScalarType dtype,
                             editors::Engine engine = editors::Engine::kFast) const {
    auto model = tiny_model(where, dtype);
    std::map<int, editors::SecondMoment> moments;
    for (const int layer : {0, 1}) {
      const auto width = model.edit_site(layer).in_features;
      auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(layer));
      const at::Tensor x_FN = at::randn({width, 2 * width}, generator, at::kDouble);
      moments.emplace(
          layer, editors::SecondMoment(
                     x_FN.mm(x_FN.t()) / static_cast<double>(2 * width) + 0.1 * at::eye(width, at::kDouble), 1000));
    }
    editors::FixedStatistics statistics(std::move(moments));
    editors::EditContext context;
    context.engine = engine;
    context.contexts = editors::ContextTemplates{{{"{}"}, {"so it is {}"}}, false, 0};
    context.statistics = &statistics;
    context.cancel = common_.cancel;
    std::vector<datasets::Fact> facts(2);
    facts[0].case_id = 1, facts[0].prompt = "the home of {} is", facts[0].subject = "Ada", facts[0].target_new = "Rome";
    facts[1].case_id = 2, facts[1].prompt = "{} lies near", facts[1].subject = "Oslo", facts[1].target_new = "Ulm";
    const auto editor = editors::make_editor(
        method.name, hparams::parse_hparams(std::string(method.layers) + method.hparams, "doctor"), model);
    const auto result = editor->edit(model, facts, context);
    if (result.failed() > 0) throw Error(ErrorClass::kNumeric, {method.name, result.outcomes[0].reason, "an edit", ""});
    Changes changes;
    for (const auto& delta : editors::merge_deltas(result.deltas))
      changes[delta.weight] = devices::to_host(delta.matrix());
    return changes;
  }

  static double difference(const Changes& got, const Changes& expected) {
    double off = 0, whole = 0;
    for (const auto& [name, want] : expected) {
      off += got.contains(name) ? (got.at(name) - want).square().sum().item<double>() : INFINITY;
      whole += want.square().sum().item<double>();
    }
    return std::sqrt(off / whole);
  }

  // The CPU itself: the other engine in float64, narrower arithmetic against float64. Other places: against the CPU.
  void edit_on(const Placed& placed) {
    const bool host = placed.devices.front().is_cpu() && placed.devices.size() == 1;
    for (const auto& method : kMethods)
      for (size_t d = 0; d < std::size(kDtypes); ++d) {
        common_.cancel.check("doctor");
        Check check;
        check.name = "edit " + placed.kind + ": " + method.name + ", " + kDtypeNames[d];
        check.device = join(placed.devices, "+", [](c10::Device device) { return devices::to_string(device); });
        check.limit = method.limits[d];
        (void)faultless(check, [&] {
          const auto engine = host && d == 0 ? editors::Engine::kReference : editors::Engine::kFast;
          auto got = edit(method, placed.devices, kDtypes[d], engine);
          auto& expected = expected_[{method.name, host ? 0 : d}];
          if (expected.empty()) expected = edit(method, {kHost}, kDtypes[host ? 0 : d]);
          check.value = difference(got, expected);
          check.status = check.value <= check.limit ? CheckStatus::kOk : CheckStatus::kFailed;
          if (check.status == CheckStatus::kFailed) check.detail = "differs from the CPU's edit";
        });
        checks_.push_back(std::move(check));
      }
  }

  // Does it, or notes in the row why it cannot be done. Where memory is short, nothing is known to be wrong.
  static bool faultless(Check& check, const std::function<void()>& work) {
    try {
      work();
      return true;
    } catch (const c10::Error& error) {
      check.detail = error.what_without_backtrace();
    } catch (const Error& error) {
      if (error.error_class() == ErrorClass::kCancelled) throw;
      check.detail = error.what();
    }
    const bool memory = check.detail.find("out of memory") != std::string::npos;
    check.status = memory ? CheckStatus::kSkipped : CheckStatus::kFailed;
    return false;
  }

  // What cannot be done is a row of its own, and the rest goes on.
  void attempt(const std::string& name, c10::Device device, const std::function<void()>& work) {
    Check check{name, CheckStatus::kFailed, "", "", devices::to_string(device)};
    if (!faultless(check, work)) checks_.push_back(std::move(check));
  }

  // The best of three, after one that warms up; `work` returns what must be finished.
  void measure(c10::Device device, const std::string& name, double flop, const std::function<at::Tensor()>& work) {
    attempt("time: " + name, device, [&] {
      double best = INFINITY;
      for (int i = 0; i < 4; ++i) {
        common_.cancel.check("doctor");
        const auto begin = std::chrono::steady_clock::now();
        (void)work().flatten()[0].item();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        if (i > 0) best = std::min(best, took.count());
      }
      ordered_json row = {{"name", name}, {"device", devices::to_string(device)}, {"seconds", best}};
      if (flop > 0) row["gflops"] = flop / best * 1e-9;
      timings_.push_back(std::move(row));
    });
  }

  static at::Tensor random_on(c10::Device device, at::IntArrayRef sizes, at::ScalarType dtype) {
    return devices::route_to(at::rand(sizes, at::kFloat).to(dtype), device, devices::Purpose::kOther);
  }

  void time(c10::Device device) {
    const at::NoGradGuard no_grad;
    for (size_t d = 0; d < std::size(kDtypes); ++d)
      attempt(std::string("time: product, ") + kDtypeNames[d], device, [&] { time_product(device, d); });
    for (const size_t d : {1, 2})
      attempt(std::string("time: attention, ") + kDtypeNames[d], device, [&] { time_attention(device, d); });
    attempt("time: solve, float64", device, [&] { time_solve(device); });
    devices::release_unused_memory();
  }

  void time_product(c10::Device device, size_t d) {
    const int64_t n = device.is_cuda() ? 4096 : 512;
    const at::Tensor a = random_on(device, {n, n}, kDtypes[d]), b = random_on(device, {n, n}, kDtypes[d]);
    const double flop = 2.0 * static_cast<double>(n * n * n);
    measure(device, "product " + std::to_string(n) + "^2, " + kDtypeNames[d], flop, [&] { return a.mm(b); });
  }

  void time_attention(c10::Device device, size_t d) {
    const auto dtype = kDtypes[d];
    const int64_t whole = device.is_cuda() ? 4096 : 256;
    const at::Tensor q = random_on(device, {64, 32, 8, 128}, dtype), k = random_on(device, {64, 8, 40, 128}, dtype);
    const at::Tensor mask = random_on(device, {64, 1, 8, 40}, dtype),
                     text = random_on(device, {1, 8, whole, 128}, dtype);
    const auto named = [&](const std::string& shape) { return "attention, " + shape + ", " + kDtypeNames[d]; };
    measure(device, named("64 rows of 8 in 40, grouped, masked"), 0,
            [&] { return at::scaled_dot_product_attention(q, k, k, mask, 0.0, false, std::nullopt, true); });
    measure(device, named("causal " + std::to_string(whole)), 0,
            [&] { return at::scaled_dot_product_attention(text, text, text, std::nullopt, 0.0, true); });
    int64_t length = whole / 2;  // a kernel that plans for every new shape shows here
    measure(device, named("ten new lengths"), 0, [&] {
      at::Tensor last;
      for (int i = 0; i < 10; ++i) {
        const at::Tensor part = text.narrow(2, 0, ++length);
        last = at::scaled_dot_product_attention(part, part, part, std::nullopt, 0.0, true);
      }
      return last;
    });
  }

  void time_solve(c10::Device device) {
    const int64_t n = device.is_cuda() ? 8192 : 512;
    const at::Tensor x = random_on(device, {n, n}, at::kDouble), rhs = random_on(device, {n, 64}, at::kDouble);
    const at::Tensor spd = x.mm(x.t()) + devices::route_like(at::eye(n, at::kDouble), x, devices::Purpose::kOther);
    measure(device, "solve " + std::to_string(n) + "^2, float64", std::pow(static_cast<double>(n), 3) / 3,
            [&] { return editors::SpdFactor::of(spd).solve(rhs); });
  }

  // Kernels of our own beside LibTorch's operators: the same numbers, and in what time.
  void compare_kernels(c10::Device device) {
    const at::NoGradGuard no_grad;
    for (const size_t d : {1, 2})
      attempt(std::string("kernels, ") + kDtypeNames[d], device, [&] { compare_kernels(device, d); });
  }

  void compare_kernels(c10::Device device, size_t d) {
    const int64_t rows = device.is_cuda() ? 4096 : 256, width = rows, heads = width / 64;
    const auto random = [&](at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
      return devices::route_to((at::rand(sizes, at::kFloat) - 0.5).to(dtype), device, devices::Purpose::kOther);
    };
    const at::Tensor x = random({rows, width}, kDtypes[d]), y = random({rows, width}, kDtypes[d]);
    if (!devices::own_kernels(x)) return;
    const at::Tensor w = random({width}, kDtypes[d]), q = x.view({rows, heads, 64});
    compare(
        device, "sum and norm", d,
        [&] {
          const auto own = devices::add_rms_norm(x, y, w, 1e-5, false);
          return at::cat({own.sum, own.normed});
        },
        [&] {
          return at::cat({x + y, at::rms_norm(x + y, {width}, w, 1e-5)});
        });
    const at::Tensor cos = random({rows, 1, 64}, kDtypes[d]), sin = random({rows, 1, 64}, kDtypes[d]);
    compare(
        device, "rotary", d, [&] { return devices::rotate_heads(q, cos, sin, false); },
        [&] {
          return at::addcmul(q * cos, at::cat({q.narrow(2, 32, 32), q.narrow(2, 0, 32)}, 2), sin);
        });
    compare(
        device, "gate", d, [&] { return devices::gated(x, y, false); }, [&] { return at::silu(x) * y; });
    const at::Tensor logits = random({rows / 8, 8 * width}, kDtypes[d]), weight = random({rows / 8});
    const at::Tensor labels = logits.argmin(1);
    compare(
        device, "loss of labels", d, [&] { return devices::head_loss(logits, labels, weight, {}, true).grad_MV; },
        [&] {
          const at::Tensor p = at::softmax(logits, 1, at::kFloat);
          return ((p - at::zeros_like(p).scatter(1, labels.unsqueeze(1), 1)) * weight.unsqueeze(1)).to(kDtypes[d]);
        });
    if (d > 1) return;  // δ is float32
    const at::Tensor zero = at::zeros_like(x), limit = random({rows, 1}) + 1;
    const at::Tensor half = at::full({rows, 1}, 0.5, x.options().dtype(at::kDouble));
    compare(
        device, "step of δ", d,
        [&] {
          at::Tensor first = zero.clone(), second = zero.clone();
          return devices::ball_adam(x, y, first, second, half, half, limit, {0.5, 0.9, 0.999, 1e-8});
        },
        [&] {
          const at::Tensor moved = x - 0.1 * y / ((0.001 * y * y).sqrt() / std::sqrt(0.5) + 1e-8);
          const at::Tensor norm = moved.norm(2, 1, true);
          return at::where(norm > limit, moved * limit / norm, moved);
        });
  }

  void compare(c10::Device device, const std::string& kernel, size_t dtype, const std::function<at::Tensor()>& own,
               const std::function<at::Tensor()>& library) {
    const std::string name = kernel + ", " + kDtypeNames[dtype];
    attempt("kernel: " + name, device, [&] {
      Check check{"kernel: " + name, CheckStatus::kOk, "", "", devices::to_string(device), 0, dtype == 1 ? 1e-5 : 1e-2};
      const at::Tensor expected = library().to(at::kDouble);
      check.value = ((own().to(at::kDouble) - expected).norm() / expected.norm()).item<double>();
      const bool near = check.value <= check.limit;
      check.detail = near ? short_number(check.value) + " from LibTorch's operators" : "not LibTorch's numbers";
      if (!near) check.status = CheckStatus::kFailed;
      checks_.push_back(std::move(check));
    });
    measure(device, name + ", own kernel", 0, own);
    measure(device, name + ", LibTorch", 0, library);
  }

  [[nodiscard]] ordered_json document(bool ok) const {
    auto devices = ordered_json::array(), checks = ordered_json::array();
    for (const auto& info : machine_)
      devices.push_back({{"name", devices::to_string(info.device)},
                         {"model", info.name},
                         {"bus", info.bus},
                         {"total_bytes", info.total_bytes},
                         {"free_bytes", info.free_bytes}});
    if (machine_.empty()) devices.push_back({{"name", "cpu"}});
    for (const auto& check : checks_) {
      const bool warned = check.status == CheckStatus::kWarning;
      const bool finite = std::isfinite(check.value);
      checks.push_back({{"name", check.name},
                        {"device", check.device},
                        {"status", warned ? "ok" : devices::to_string(check.status)},
                        {"value", finite ? ordered_json(check.value) : ordered_json(nullptr)},
                        {"limit", check.limit},
                        {"reason", check.detail + (check.advice.empty() ? "" : "; " + check.advice)}});
    }
    return {{"devices", devices}, {"checks", checks}, {"timings", timings_}, {"ok", ok}};
  }

  // Checks of one sort on one line; those that failed on their own.
  [[nodiscard]] std::string text(bool ok) const {
    struct Sum {
      int64_t all = 0, good = 0;
      const Check* worst = nullptr;
    };
    std::vector<std::pair<std::string, Sum>> sums;
    std::string out, failures;
    for (const auto& check : checks_) {
      const bool copy = check.name.starts_with("copy "), edit = check.name.starts_with("edit ");
      if (check.status == CheckStatus::kFailed)
        failures +=
            "failed   " + check.name + (edit ? " (" + check.device + ")" : "") + ": " + check.detail +
            (check.limit > 0 ? ": " + short_number(check.value) + ", at most " + short_number(check.limit) : "") +
            (check.advice.empty() ? "" : " (" + check.advice + ")") + "\n";
      if ((!copy && !edit) || check.status == CheckStatus::kSkipped) {
        if (check.status != CheckStatus::kFailed)
          out += std::string(devices::to_string(check.status)) + "  " + check.name + ": " + check.detail +
                 (check.advice.empty() ? "" : " (" + check.advice + ")") + "\n";
        continue;
      }
      const std::string sort = copy ? "copies" : "edits" + check.name.substr(4, check.name.find(':') - 4);
      if (sums.empty() || sums.back().first != sort) sums.emplace_back(sort, Sum());
      auto& sum = sums.back().second;
      ++sum.all;
      sum.good += check.status != CheckStatus::kFailed;
      const auto share = [](const Check& c) { return c.limit > 0 ? c.value / c.limit : 0; };
      if (edit && (!sum.worst || share(check) > share(*sum.worst))) sum.worst = &check;
    }
    for (const auto& [sort, sum] : sums) {
      out += (sum.good == sum.all ? "ok  " : "failed  ") + sort + ": " + std::to_string(sum.good) + " of " +
             std::to_string(sum.all) + (sort == "copies" ? " arrive whole" : " equal the CPU's");
      if (sum.worst)
        out += "; the farthest " + short_number(sum.worst->value) + " of " + short_number(sum.worst->limit) + " (" +
               sum.worst->name.substr(sum.worst->name.find(": ") + 2) + ", " + sum.worst->device + ")";
      out += "\n";
    }
    TextTable table({"timing", "device", "ms", "GFLOP/s"});
    for (const auto& row : timings_)
      table.add({row["name"].get<std::string>(), row["device"].get<std::string>(),
                 short_number(1e3 * row["seconds"].get<double>()),
                 row.contains("gflops") ? short_number(row["gflops"].get<double>()) : std::string()});
    return out + table.text() + failures + (ok ? "all is well\n" : "something is wrong: see the lines that failed\n");
  }

  const ModelOptions& options_;
  const Common& common_;
  int64_t n_layers_ = 4;
  std::vector<devices::DeviceInfo> machine_;
  std::vector<c10::Device> gpus_;
  std::vector<Check> checks_;
  std::map<std::pair<std::string, size_t>, Changes> expected_;
  ordered_json timings_ = ordered_json::array();
};

}  // namespace

int run_full_check(const ModelOptions& options, const Common& common) {
  return FullCheck(options, common).run();
}

}  // namespace emend::tools

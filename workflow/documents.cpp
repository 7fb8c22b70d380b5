#include <ATen/Parallel.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_svdvals.h>
#include <emend/core/mapped.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <emend/devices/units.h>
#include <emend/evaluation/free_text.h>
#include <emend/evaluation/statistics.h>
#include <emend/models/family.h>
#include <emend/workflow/documents.h>
#include <emend/workflow/handles.h>
#include <emend/workflow/lifelong.h>
#include <emend_version.h>
#include <sys/utsname.h>
#include <torch/version.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <sstream>
#include <thread>

namespace emend::workflow {

namespace {

std::string fixed(double value, int digits) {
  return formatted("%.*f", digits, value);
}

double rounded(double value, int digits) {
  const double scale = std::pow(10.0, digits);
  return std::round(value * scale) / scale;
}

std::string one_line(std::string text) {
  for (char& c : text)
    if (c == '\n' || c == '\r' || c == '\t') c = ' ';
  return text;
}

std::string figure_text(double value, int digits) {
  return std::fabs(value) < 1e6 ? fixed(value, digits) : formatted("%.3g", value);
}

// "68.0 – 100.0", or nothing.
std::string interval_text(const nlohmann::json& figures, const evaluation::MetricField& field) {
  auto range = figures.value("ci95", nlohmann::json::object()).value(field.key, nlohmann::json());
  if (range.is_null()) range = figures.value(field.key + "_ci95", nlohmann::json());
  if (!range.is_array()) return "";
  return figure_text(range[0].get<double>(), field.digits()) + " – " +
         figure_text(range[1].get<double>(), field.digits());
}

nlohmann::ordered_json metrics_document(const RunRecord& record) {
  nlohmann::ordered_json metrics = nlohmann::ordered_json::object();
  for (const auto& name : record.metrics) {
    if (record.before && record.before->summary.contains(name)) {
      nlohmann::json before = record.before->summary[name];
      if (before.contains("retrieval")) {  // of the unedited model too, but not its state before an edit
        metrics[name]["retrieval"] = before["retrieval"];
        before.erase("retrieval");
      }
      metrics[name]["pre"] = std::move(before);
    }
    if (record.after && record.after->summary.contains(name)) metrics[name]["post"] = record.after->summary[name];
  }
  return metrics;
}

nlohmann::json to_json(const datasets::Finding& finding) {
  return {{"severity", datasets::to_string(finding.severity)},
          {"check", finding.check},
          {"where", finding.where},
          {"text", finding.text}};
}

nlohmann::json templates_of(const Batch& batch) {
  return batch.contexts ? batch.contexts->to_json() : nlohmann::json();
}

constexpr int64_t kSpectrum = 16;  // singular values shown
constexpr int64_t kDense = 2048;   // largest rank, or side of a dense update, that is decomposed: more takes minutes

// Leading singular values; of factors, those of the small matrix between their orthogonal bases.
std::vector<double> spectrum(const editors::WeightDelta& delta) {
  at::Tensor core;
  if (delta.rank() > kDense) return {};
  if (delta.low_rank()) {
    const auto r_left = std::get<1>(at::linalg_qr(delta.left_DR.to(at::kDouble), "r"));
    const auto r_right = std::get<1>(at::linalg_qr(delta.right_FR.to(at::kDouble), "r"));
    core = r_left.matmul(r_right.t());
  } else {
    if (delta.dense_DF.dim() != 2) return {};
    core = delta.dense_DF.to(at::kDouble);
  }
  const at::Tensor values = devices::to_host(at::linalg_svdvals(core), devices::Purpose::kHost).contiguous();
  const auto* begin = values.const_data_ptr<double>();
  return {begin, begin + std::min(kSpectrum, values.numel())};
}

// One object a rewritten weight, all batches taken together: layer, weight, update_norm, weight_norm (as it was
// before), relative, spectrum (the leading singular values of what was added), survived (the least of the batches).
nlohmann::json layer_figures(const std::vector<editors::EditResult>& batches) {
  std::vector<editors::WeightDelta> all;
  std::map<std::string, double> norm_before;
  for (const auto& batch : batches)
    for (const auto& layer : batch.layers)
      if (layer.relative_update_norm > 0)
        norm_before.emplace(layer.weight, layer.update_norm / layer.relative_update_norm);
  const auto survived = survived_by_weight(batches);
  for (const auto& batch : batches) all.insert(all.end(), batch.deltas.begin(), batch.deltas.end());
  nlohmann::json out = nlohmann::json::array();
  for (const auto& delta : editors::merge_deltas(all)) {
    const double norm = delta.norm();
    nlohmann::json one = {
        {"layer", delta.layer}, {"weight", delta.weight}, {"update_norm", norm}, {"spectrum", spectrum(delta)}};
    if (const auto whole = norm_before.find(delta.weight); whole != norm_before.end()) {
      one["weight_norm"] = whole->second;
      one["relative"] = norm / whole->second;
    }
    if (const auto it = survived.find(delta.weight); it != survived.end()) one["survived"] = it->second;
    out.push_back(std::move(one));
  }
  return out;
}

nlohmann::json machine_figures() {
  utsname system{};
  ::uname(&system);
  const auto told = [](const devices::DeviceInfo& device) {
    return devices::to_string(device.device) + ": " + device.name + ", " + devices::format_bytes(device.total_bytes);
  };
  return {{"devices", join(devices::visible_devices(), "; ", told)},
          {"processors", std::thread::hardware_concurrency()},
          {"threads", at::get_num_threads()},
          {"system", std::string(system.sysname) + " " + system.release + " " + system.machine}};
}

// By device: the weights' bytes and the peak.
nlohmann::json memory_figures(const models::Model& model) {
  nlohmann::json out = nlohmann::json::object();
  for (const auto device : model.placement().devices())
    out[devices::to_string(device)] = {{"weights", 0}, {"peak", devices::device_memory_stats(device).peak}};
  std::map<const void*, bool> seen;  // tied weights share their bytes
  for (const auto& name : model.weight_names())
    for (const auto& weight : model.weight_copies(name)) {
      if (!seen.emplace(weight.data_ptr(), true).second) continue;
      auto& device = out[devices::to_string(weight.device())]["weights"];
      device = (device.is_number() ? device.get<int64_t>() : 0) + static_cast<int64_t>(weight.nbytes());
    }
  return out;
}

std::string chance(double probability) {
  return "   (probability of the answer " + (probability < 0.001 ? "below 0.001" : fixed(probability, 3)) + ")\n";
}

std::string written(const std::string& continuation) {
  return trimmed(continuation).empty() ? " (the text ends here)" : one_line(continuation);
}

// What the family "free" has read beside the edited prompt, a line a kind.
std::string further_texts(const RunRecord& record, size_t fact) {
  std::string out;
  if (!record.before || !record.after || fact >= record.before->cases.size() || fact >= record.after->cases.size())
    return out;
  const nlohmann::json nothing, &before = record.before->cases[fact], &after = record.after->cases[fact];
  for (const auto& one : evaluation::further_texts(before.value("free", nothing), after.value("free", nothing)))
    out += "    " + one.label + ": " + one_line(one.prompt) + " …" + written(one.after) + "   (before: …" +
           written(one.before) + ")\n";
  return out;
}

// The facts that did not work out, with their reasons; the rest of a long list is in the files.
std::string verdicts_text(const RunRecord& record, const datasets::FactSet& facts) {
  constexpr int64_t kMost = 20;
  const int64_t said = record.count(Verdict::kSaid), failed = record.count(Verdict::kFailed);
  std::ostringstream out;
  out << counted(facts.facts.size(), "fact") << ": " << said << " said by the model now";
  if (const auto all = std::ssize(record.verdicts); all > 0) {
    const double share = static_cast<double>(said) / static_cast<double>(all);
    const auto [low, high] = evaluation::share_interval(share, all);
    out << " (" << whole_percent(share) << "; 95 % interval " << fixed(100 * low, 0) << "–" << fixed(100 * high, 0)
        << ")";
  }
  if (const int64_t silent = record.count(Verdict::kNotSaid)) out << ", " << silent << " written but not said";
  out << (failed > 0 ? ", " + std::to_string(failed) + " failed" : std::string(", none failed")) << '\n';
  int64_t listed = 0;
  for (size_t i = 0; i < record.verdicts.size(); ++i) {
    const auto& [verdict, reason] = record.verdicts[i];
    if (verdict == Verdict::kSaid || ++listed > kMost) continue;
    const auto& fact = facts.facts[i];
    out << "  " << fact.where() << " (" << fact.subject << " → " << fact.target_new << "): " << one_line(reason)
        << '\n';
  }
  if (listed > kMost) out << "  and " << listed - kMost << " more: cases.jsonl has them all\n";
  return out.str();
}

}  // namespace

std::string_view to_string(Verdict verdict) {
  constexpr std::string_view kNames[] = {"said", "not_said", "failed"};
  return kNames[static_cast<size_t>(verdict)];
}

nlohmann::ordered_json peak_bytes(const models::Model& model) {
  nlohmann::ordered_json peaks;
  peaks["host"] = devices::device_memory_stats(c10::Device(c10::kCPU)).peak;
  for (const auto device : model.placement().devices())
    if (!device.is_cpu()) peaks[devices::to_string(device)] = devices::device_memory_stats(device).peak;
  return peaks;
}

std::vector<const editors::FactOutcome*> RunRecord::outcomes() const {
  std::vector<const editors::FactOutcome*> all;
  for (const auto& batch : batches)
    for (const auto& outcome : batch.outcomes) all.push_back(&outcome);
  return all;
}

std::map<std::string, double> survived_by_weight(const std::vector<editors::EditResult>& batches) {
  std::map<std::string, double> survived;
  for (const auto& batch : batches)
    for (const auto& layer : batch.layers) {
      const auto [it, fresh] = survived.emplace(layer.weight, layer.survived);
      if (!fresh) it->second = std::min(it->second, layer.survived);
    }
  return survived;
}

// As a shell takes it.
static std::string quoted(const std::string& word) {
  const auto plain = [](unsigned char c) { return std::isalnum(c) || c >= 0x80 || std::strchr("_-+=:,./@%", c); };
  if (!word.empty() && std::ranges::all_of(word, plain)) return word;
  return "'" + replace_all(word, "'", "'\\''") + "'";
}

std::string command_text(const std::vector<std::string>& words) {
  return join(words, " ", quoted);
}

nlohmann::json batch_document(const Batch& batch) {
  return {{"deltas", mapped(batch.deltas,
                            [](const editors::WeightDelta& delta) -> nlohmann::json {
                              return {{"weight", delta.weight},
                                      {"layer", delta.layer},
                                      {"in_out", delta.orientation == models::Orientation::kInOut},
                                      {"low_rank", delta.low_rank()}};
                            })},
          {"outcomes", mapped(batch.outcomes, [](const auto& outcome) { return editors::to_json(outcome); })},
          {"layers", mapped(batch.layers, [](const auto& figures) { return editors::to_json(figures); })},
          {"seconds", batch.seconds},
          {"contexts", templates_of(batch)},
          {"hparams", batch.hparams},
          {"closing", batch.outcomes.empty()}};
}

Batch read_batch_document(const nlohmann::json& document) {
  Batch batch;
  for (const auto& entry : document.at("deltas")) {
    auto& delta = batch.deltas.emplace_back();
    entry.at("weight").get_to(delta.weight);
    entry.at("layer").get_to(delta.layer);
    delta.orientation = entry.at("in_out").get<bool>() ? models::Orientation::kInOut : models::Orientation::kOutIn;
  }
  for (const auto& outcome : document.at("outcomes")) batch.outcomes.push_back(editors::outcome_from_json(outcome));
  for (const auto& figures : document.at("layers")) batch.layers.push_back(editors::figures_from_json(figures));
  document.at("seconds").get_to(batch.seconds);
  if (const auto& contexts = document.at("contexts"); !contexts.is_null()) {
    batch.contexts = editors::parse_contexts(contexts, "checkpoint");
    batch.contexts->sampled = contexts.at("sampled");
    batch.contexts->seed = contexts.value("seed", uint64_t{0});
  }
  batch.hparams = document.at("hparams");
  return batch;
}

nlohmann::json measured_document(const Measured& measured) {
  return {{"retention", measured.retention.to_json()}, {"lifelong", measured.lifelong}};
}

Measured read_measured_document(const nlohmann::json& document) {
  Measured measured;
  document.at("lifelong").get_to(measured.lifelong);
  measured.retention = evaluation::RetentionMatrix::from_json(document.at("retention"));
  return measured;
}

nlohmann::ordered_json results_document(const RunRecord& record, const RunOptions& options,
                                        const datasets::FactSet& facts, const models::Model& model) {
  nlohmann::ordered_json document;
  document["schema"] = 1;
  document["emend"] = EMEND_VERSION_TEXT;
  document["model"] = {{"path", record.model_path},
                       {"family", model.family().name},
                       {"fingerprint", model.fingerprint()},
                       {"parameters", model.parameter_count()}};
  document["editor"] = record.editor;
  document["hparams"] = record.hparams;
  document["protocol"] = options.protocol;
  document["engine"] = options.engine;
  document["facts"] = facts.facts.size();
  document["facts_file"] = {{"path", facts.path},
                            {"format", facts.format},
                            {"fingerprint", facts.fingerprint},
                            {"skipped", facts.skipped.size()},
                            {"choices", facts.choices}};
  document["seed"] = options.seed;
  document["device_map"] = model.placement().to_json(models::device_module_names(model.family(), model.config()));
  document["dtype"] = options.model.dtype;
  document["compute_dtype"] = record.compute_dtype;
  document["metrics"] = metrics_document(record);
  for (const auto& [phase, seconds] : record.seconds) document["seconds"][phase] = rounded(seconds, 3);
  document["peak_bytes"] = record.peak_bytes;
  const int64_t said = record.count(Verdict::kSaid), not_said = record.count(Verdict::kNotSaid);
  document["edits"] = {
      {"applied", said + not_said}, {"said", said}, {"not_said", not_said}, {"failed", record.count(Verdict::kFailed)}};
  document["weights_changed"] = record.weights_changed;
  document["spare_neurons"] = record.spare_neurons;
  document["batches"] = record.batches.size();
  document["statistics"] = record.statistics;
  for (const char* key : {"layers_from_cache", "layers_computed", "seconds"})  // apart from what two equal runs share
    if (const auto found = document["statistics"].find(key); found != document["statistics"].end()) {
      document["cache"][key] = *found;
      document["statistics"].erase(key);
    }
  document["transfers"] = record.transfers;
  document["lint"] = mapped(record.findings, [](const auto& finding) { return to_json(finding); });
  document["guard"] = mapped(record.guard, [](const auto& reading) { return evaluation::to_json(reading); });
  if (!record.batches.empty()) document["contexts"] = templates_of(record.batches.back());
  if (!record.measured.retention.empty()) document["retention"] = record.measured.retention.to_json();
  if (options.lifelong()) document["lifelong"] = record.measured.lifelong;
  document["command"] = record.command_line;
  return document;
}

std::vector<nlohmann::json> case_documents(const RunRecord& record, const datasets::FactSet& facts) {
  std::vector<nlohmann::json> lines;
  const auto outcomes = record.outcomes();
  for (size_t i = 0; i < facts.facts.size(); ++i) {
    const auto& fact = facts.facts[i];
    nlohmann::json line = {
        {"case_id", fact.case_id}, {"subject", fact.subject}, {"prompt", fact.prompt}, {"target", fact.target_new}};
    if (!fact.relation_id.empty()) line["relation_id"] = fact.relation_id;
    if (fact.target_true) line["target_true"] = *fact.target_true;
    if (i < outcomes.size()) line.update(editors::to_json(*outcomes[i], false));
    if (i < record.verdicts.size()) {
      line["verdict"] = to_string(record.verdicts[i].verdict);
      line["reason"] = record.verdicts[i].reason;
    }
    if (record.before && i < record.before->cases.size()) line["metrics"]["pre"] = record.before->cases[i];
    if (record.after && i < record.after->cases.size()) line["metrics"]["post"] = record.after->cases[i];
    lines.push_back(std::move(line));
  }
  return lines;
}

nlohmann::json report_extras(const RunRecord& record, const datasets::FactSet& facts, const models::Model& model) {
  nlohmann::json extras = {{"directory", record.out},
                           {"versions", {{"libtorch", TORCH_VERSION}, {"compiler", __VERSION__}}}};
  const auto& retention = record.measured.retention.to_json();
  auto& by_edits = extras["efficacy_by_edits"] = nlohmann::json::array();
  for (size_t s = 0; s < retention["edits_applied"].size(); ++s)
    by_edits.push_back(
        {{"edits", retention["edits_applied"][s]}, {"efficacy_success", retention["edited_success"][s]}});
  extras["command"] = command_text(record.command_line);
  extras["started"] = record.started;
  auto& continuations = extras["continuations"] = nlohmann::json::array();
  for (size_t i = 0; i < record.text_before.size() && i < record.text_after.size(); ++i)
    continuations.push_back({{"case_id", facts.facts[i].case_id},
                             {"prompt", record.text_before[i].prompt},
                             {"before", record.text_before[i].text},
                             {"after", record.text_after[i].text},
                             {"target", facts.facts[i].target_new},
                             {"probability_before", record.text_before[i].probability},
                             {"probability_after", record.text_after[i].probability}});
  auto& curves = extras["curves"] = nlohmann::json::array();
  for (const auto* outcome : record.outcomes()) {
    nlohmann::json curve = editors::to_json(*outcome)["curve"];
    curve["case_id"] = outcome->case_id;
    curves.push_back(std::move(curve));
  }
  const auto& layers = extras["layers"] = layer_figures(record.batches);
  nlohmann::json edited = nlohmann::json::array();
  for (const auto& layer : layers) edited.push_back(layer.value("layer", 0));
  nlohmann::json placed = nlohmann::json::object(), used = nlohmann::json::array();
  const auto& plan = model.placement();
  for (size_t l = 0; l < plan.layers.size(); ++l) placed[std::to_string(l)] = devices::to_string(plan.layers[l]);
  for (const auto device : plan.devices()) used.push_back(devices::to_string(device));
  extras["placement"] = {{"devices", used},
                         {"layers", placed},
                         {"embedding", devices::to_string(plan.embedding)},
                         {"head", devices::to_string(plan.head)},
                         {"edited_layers", edited}};
  extras["memory"] = memory_figures(model);
  extras["machine"] = machine_figures();
  if (!record.measured.retention.empty()) extras["retention"] = retention;
  return extras;
}

std::string metrics_table(const std::vector<std::pair<std::string, nlohmann::json>>& states) {
  std::ostringstream out;
  for (const auto& family : evaluation::metric_families()) {
    std::vector<std::pair<std::string, nlohmann::json>> columns;
    for (const auto& [state, summary] : states) {
      if (!summary.contains(family.name)) continue;
      columns.emplace_back(state, summary[family.name]);
      if (const auto told = summary[family.name].find("retrieval"); told != summary[family.name].end())
        columns.emplace_back("told", *told);
    }
    if (columns.empty()) continue;
    const auto& first = columns[0].second;
    std::vector<std::string> head = {family.name + (first.contains("n") ? " (n = " + first["n"].dump() + ")" : ""), ""};
    for (const auto& [state, figures] : columns) head.push_back(state);
    head.emplace_back("95 %");
    TextTable table(head, 2);
    for (const auto& field : family.fields) {
      if (std::ranges::none_of(
              columns, [&](const auto& one) { return one.second.value(field.key, nlohmann::json()).is_number(); }))
        continue;  // the facts do not support it
      std::vector<std::string> row = {
          "  " + field.key + (field.paper_name.empty() ? "" : " [" + field.paper_name + "]"), field.unit};
      for (const auto& [state, figures] : columns) {
        const auto value = figures.value(field.key, nlohmann::json());
        row.push_back(value.is_number() ? figure_text(value.get<double>(), std::max(2, field.digits())) : "-");
      }
      const auto last =
          std::find_if(columns.rbegin(), columns.rend(), [](const auto& one) { return one.first != "told"; });
      row.push_back(interval_text(last->second, field));
      table.add(std::move(row));
    }
    out << table.text("");
  }
  return out.str();
}

std::string summary_text(const RunRecord& record, const datasets::FactSet& facts) {
  std::ostringstream out;
  if (!record.text_after.empty()) {
    out << "What the model says now (greedy)\n";
    for (size_t i = 0; i < record.text_after.size(); ++i) {
      out << "  " << one_line(facts.facts[i].full_prompt()) << " …   asked for: " << facts.facts[i].target_new << '\n';
      if (i < record.text_before.size())
        out << "    before  " << written(record.text_before[i].text) << chance(record.text_before[i].probability);
      out << "    after   " << written(record.text_after[i].text) << chance(record.text_after[i].probability)
          << further_texts(record, i);
    }
    out << '\n';
  }
  std::vector<std::pair<std::string, nlohmann::json>> states;
  if (record.before) states.emplace_back("before", record.before->summary);
  if (record.after) states.emplace_back("after", record.after->summary);
  if (!states.empty()) out << metrics_table(states) << '\n';
  if (const auto& entries = record.measured.lifelong; !entries.empty()) {
    TextTable table(lifelong_heads(), 0);
    for (const auto& entry : entries) table.add(lifelong_cells(entry));
    out << table.text() << '\n';
  }
  out << verdicts_text(record, facts);
  if (record.spare_neurons > 0)
    out << "Every MLP has " << record.spare_neurons
        << " neurons more, which the edit uses: the saved model is wider by them, and the pack is for that width\n";
  out << "Seconds:";
  for (const auto& [phase, seconds] : record.seconds) out << "  " << phase << ' ' << fixed(seconds, 1);
  out << '\n';
  for (const auto& [what, path] : record.files) out << what << ": " << path << '\n';
  return out.str();
}

}  // namespace emend::workflow

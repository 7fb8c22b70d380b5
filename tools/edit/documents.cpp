#include "documents.h"

#include <emend/devices/runtime.h>
#include <emend/models/family.h>
#include <torch/version.h>

#include <cmath>
#include <cstdio>
#include <sstream>

#include "figures.h"
#include "version.h"

namespace emend::tools {
namespace {

std::string fixed(double value, int digits) {
  char text[48];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
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

nlohmann::ordered_json metrics_document(const RunRecord& record) {
  nlohmann::ordered_json metrics = nlohmann::ordered_json::object();
  for (const auto& name : record.metrics) {
    if (record.before && record.before->summary.contains(name)) metrics[name]["pre"] = record.before->summary[name];
    if (record.after && record.after->summary.contains(name)) metrics[name]["post"] = record.after->summary[name];
  }
  return metrics;
}

nlohmann::ordered_json peak_bytes(const models::Model& model) {
  nlohmann::ordered_json peaks;
  peaks["host"] = devices::device_memory_stats(c10::Device(c10::kCPU)).peak;
  for (const auto device : model.placement().devices())
    if (!device.is_cpu()) peaks[devices::to_string(device)] = devices::device_memory_stats(device).peak;
  return peaks;
}

std::vector<const nlohmann::json*> outcomes_of(const RunRecord& record) {
  std::vector<const nlohmann::json*> outcomes;
  for (const auto& batch : record.batches)
    for (const auto& outcome : batch.outcomes) outcomes.push_back(&outcome);
  return outcomes;
}

}  // namespace

nlohmann::ordered_json results_document(const RunRecord& record, const EditOptions& options,
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
                            {"skipped", facts.skipped},
                            {"choices", facts.choices}};
  document["seed"] = options.seed;
  document["device_map"] = model.placement().to_json(models::device_module_names(model.family(), model.config()));
  document["dtype"] = options.model.dtype;
  document["compute_dtype"] = record.compute_dtype;
  document["metrics"] = metrics_document(record);
  for (const auto& [phase, seconds] : record.seconds) document["seconds"][phase] = rounded(seconds, 3);
  document["peak_bytes"] = peak_bytes(model);
  document["edits"] = {{"applied", static_cast<int64_t>(facts.facts.size()) - record.failed},
                       {"failed", record.failed}};
  document["weights_changed"] = record.weights_changed;
  document["batches"] = record.batches.size();
  document["statistics"] = record.statistics;
  document["transfers"] = record.transfers;
  document["lint"] = record.findings;
  document["guard"] = record.guard;
  if (!record.batches.empty()) document["contexts"] = record.batches.back().contexts;
  if (!record.retention.empty()) document["retention"] = record.retention.to_json();
  document["command"] = record.command_line;
  return document;
}

std::vector<nlohmann::json> case_documents(const RunRecord& record, const datasets::FactSet& facts) {
  std::vector<nlohmann::json> lines;
  const auto outcomes = outcomes_of(record);
  for (size_t i = 0; i < facts.facts.size(); ++i) {
    const auto& fact = facts.facts[i];
    nlohmann::json line = {
        {"case_id", fact.case_id}, {"subject", fact.subject}, {"prompt", fact.prompt}, {"target", fact.target_new}};
    if (i < outcomes.size()) {
      for (const auto& [key, value] : outcomes[i]->items())
        if (key != "curve") line[key] = value;
    }
    if (record.before && i < record.before->cases.size()) line["metrics"]["pre"] = record.before->cases[i];
    if (record.after && i < record.after->cases.size()) line["metrics"]["post"] = record.after->cases[i];
    lines.push_back(std::move(line));
  }
  return lines;
}

nlohmann::json report_extras(const RunRecord& record, const datasets::FactSet& facts, const models::Model& model) {
  nlohmann::json extras = {{"directory", record.out},
                           {"versions", {{"libtorch", TORCH_VERSION}, {"compiler", __VERSION__}}},
                           {"efficacy_by_edits", record.efficacy_by_edits}};
  extras["command"] = command_text(record.command_line);
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
  for (const auto* outcome : outcomes_of(record)) {
    if (!outcome->contains("curve")) continue;
    nlohmann::json curve = (*outcome)["curve"];
    curve["case_id"] = outcome->value("case_id", int64_t{0});
    curves.push_back(std::move(curve));
  }
  const auto& layers = extras["layers"] = layer_figures(record.batches, model);
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
  if (!record.retention.empty()) extras["retention"] = record.retention.to_json();
  return extras;
}

std::string summary_text(const RunRecord& record, const datasets::FactSet& facts) {
  std::ostringstream out;
  if (!record.text_after.empty()) {
    out << "What the model says now (greedy)\n";
    for (size_t i = 0; i < record.text_after.size(); ++i) {
      out << "  " << record.text_after[i].prompt << " …   asked for: " << facts.facts[i].target_new << '\n';
      if (i < record.text_before.size())
        out << "    before  " << one_line(record.text_before[i].text)
            << "   (p = " << fixed(record.text_before[i].probability, 3) << ")\n";
      out << "    after   " << one_line(record.text_after[i].text)
          << "   (p = " << fixed(record.text_after[i].probability, 3) << ")\n";
    }
    out << '\n';
  }
  std::vector<std::pair<std::string, nlohmann::json>> states;
  if (record.before) states.emplace_back("before", record.before->summary);
  if (record.after) states.emplace_back("after", record.after->summary);
  if (!states.empty()) out << metrics_table(states) << '\n';
  out << "Facts: " << facts.facts.size() << " edited";
  if (record.failed > 0) {
    out << ", of which " << record.failed << " failed:\n";
    const auto outcomes = outcomes_of(record);
    for (size_t i = 0; i < outcomes.size(); ++i)
      if (outcomes[i]->value("status", "") == "failed")
        out << "  " << facts.facts[i].where() << " (" << facts.facts[i].subject
            << "): " << outcomes[i]->value("reason", "") << '\n';
  } else {
    out << ", none failed\n";
  }
  out << "Seconds:";
  for (const auto& [phase, seconds] : record.seconds) out << "  " << phase << ' ' << fixed(seconds, 1);
  out << '\n';
  for (const auto& [what, path] : record.files) out << what << ": " << path << '\n';
  return out.str();
}

}  // namespace emend::tools

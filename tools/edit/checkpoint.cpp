#include "checkpoint.h"

#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/safetensors.h>
#include <emend/core/sha256.h>
#include <emend/devices/route.h>
#include <emend/editors/apply.h>

#include "../run_directory.h"

namespace emend::tools {
namespace {

using editors::WeightDelta;

std::string numbered(const std::string& stem, size_t index) {
  std::string digits = std::to_string(index);
  return stem + std::string(digits.size() < 6 ? 6 - digits.size() : 0, '0') + digits + ".safetensors";
}

std::string checksum(const std::vector<std::pair<std::string, at::Tensor>>& tensors, const std::string& document) {
  Sha256 hash;
  hash.update(document);
  for (const auto& [name, tensor] : tensors) {
    hash.update(name);
    hash.update(tensor.const_data_ptr(), tensor.numel() * tensor.element_size());
  }
  return hash.hex();
}

void save_checked(const std::filesystem::path& path, std::vector<std::pair<std::string, at::Tensor>> tensors,
                  const nlohmann::json& document) {
  for (auto& [name, tensor] : tensors) tensor = devices::to_host(tensor.detach()).contiguous();
  const std::string text = dump_json(document, -1);
  write_safetensors(path, tensors, {{"document", text}, {"sha256", checksum(tensors, text)}});
}

struct Checked {
  std::map<std::string, at::Tensor> tensors;
  nlohmann::json document;
};

Checked load_checked(const std::filesystem::path& path) {
  const SafetensorsFile file(path);
  const auto document = file.metadata().find("document"), sum = file.metadata().find("sha256");
  std::vector<std::pair<uint64_t, std::string>> order;  // the checksum runs in file order
  for (const auto& [name, info] : file.tensors()) order.emplace_back(info.offset, name);
  std::sort(order.begin(), order.end());
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& [offset, name] : order) tensors.emplace_back(name, file.tensor(name));
  if (document == file.metadata().end() || sum == file.metadata().end() ||
      checksum(tensors, document->second) != sum->second)
    throw Error(ErrorClass::kCorruption, {path.string(), "the checksum does not match", "an unaltered checkpoint", ""});
  Checked checked;
  for (auto& [name, tensor] : tensors) checked.tensors.emplace(name, tensor.clone());
  checked.document = nlohmann::json::parse(document->second);
  return checked;
}

// Tensors are stored under "<index>.left", "<index>.right" or "<index>.dense".
nlohmann::json describe(const WeightDelta& delta) {
  return {{"weight", delta.weight},
          {"layer", delta.layer},
          {"in_out", delta.orientation == models::Orientation::kInOut},
          {"low_rank", delta.low_rank()}};
}

WeightDelta read_delta(const nlohmann::json& entry, const std::string& prefix,
                       std::map<std::string, at::Tensor>& tensors) {
  WeightDelta delta;
  delta.weight = entry.at("weight").get<std::string>();
  delta.layer = entry.at("layer").get<int>();
  delta.orientation = entry.at("in_out").get<bool>() ? models::Orientation::kInOut : models::Orientation::kOutIn;
  if (entry.at("low_rank").get<bool>()) {
    delta.left_DR = tensors.at(prefix + ".left");
    delta.right_FR = tensors.at(prefix + ".right");
  } else {
    delta.dense_DF = tensors.at(prefix + ".dense");
  }
  return delta;
}

FinishedBatch read_batch(const std::filesystem::path& path) {
  Checked checked = load_checked(path);
  FinishedBatch batch;
  const auto& deltas = checked.document.at("deltas");
  for (size_t i = 0; i < deltas.size(); ++i)
    batch.deltas.push_back(read_delta(deltas[i], std::to_string(i), checked.tensors));
  batch.outcomes = checked.document.at("outcomes").get<std::vector<nlohmann::json>>();
  batch.layers = checked.document.at("layers").get<std::vector<nlohmann::json>>();
  batch.seconds = checked.document.at("seconds");
  batch.contexts = checked.document.at("contexts");
  batch.hparams = checked.document.at("hparams");
  batch.closing = checked.document.value("closing", false);
  return batch;
}

}  // namespace

FinishedBatch finished_batch(const editors::EditResult& result) {
  FinishedBatch batch;
  batch.deltas = result.deltas;
  for (const auto& outcome : result.outcomes) batch.outcomes.push_back(editors::to_json(outcome));
  for (const auto& layer : result.layers) batch.layers.push_back(editors::to_json(layer));
  batch.seconds = result.seconds;
  if (result.contexts) batch.contexts = result.contexts->to_json();
  batch.hparams = result.hparams;
  return batch;
}

RunCheckpoint::RunCheckpoint(std::filesystem::path folder, nlohmann::json settings, bool resume, bool reader)
    : folder_(std::move(folder)), reader_(reader) {
  const auto path = folder_ / "settings.json";
  if (resume && std::filesystem::exists(path)) {
    const auto old = nlohmann::json::parse(read_file(path), nullptr, false);
    for (const auto& [key, value] : settings.items())
      if (!old.is_object() || old.value(key, nlohmann::json()) != value)
        throw Error(ErrorClass::kInvalidArgument,
                    {path.string(), "\"" + key + "\" is " + value.dump().substr(0, 80) + " now",
                     (old.is_object() ? old.value(key, nlohmann::json()).dump().substr(0, 80)
                                      : std::string("readable settings")) +
                         ", as when the run began",
                     "give the same options, or start anew in another folder"});
    return;
  }
  fresh_ = true;
  if (reader_) return;
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
  std::filesystem::create_directories(folder_, ignored);
  write_file(path, dump_json(settings) + "\n");
}

std::filesystem::path RunCheckpoint::batch_path(size_t index) const {
  return folder_ / numbered("batch-", index);
}
std::filesystem::path RunCheckpoint::state_path(size_t index) const {
  return folder_ / numbered("state-", index);
}

std::vector<FinishedBatch> RunCheckpoint::load(const Log& log) const {
  std::vector<FinishedBatch> batches;
  if (fresh_) return batches;
  while (std::filesystem::exists(batch_path(batches.size()))) {
    const auto path = batch_path(batches.size());
    try {
      batches.push_back(read_batch(path));
    } catch (const std::exception& error) {
      log.warning("checkpoint.damaged", path.string() + " is damaged and is computed again (" + error.what() + ")");
      break;
    }
  }
  return batches;
}

void RunCheckpoint::save(size_t index, const FinishedBatch& batch,
                         const std::map<std::string, at::Tensor>& editor_state) const {
  if (reader_) return;
  if (!editor_state.empty())
    save_checked(state_path(index), {editor_state.begin(), editor_state.end()}, nlohmann::json::object());
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  auto deltas = nlohmann::json::array();
  for (size_t i = 0; i < batch.deltas.size(); ++i) {
    const WeightDelta& delta = batch.deltas[i];
    const std::string prefix = std::to_string(i);
    deltas.push_back(describe(delta));
    if (delta.low_rank()) {
      tensors.emplace_back(prefix + ".left", delta.left_DR);
      tensors.emplace_back(prefix + ".right", delta.right_FR);
    } else {
      tensors.emplace_back(prefix + ".dense", delta.dense_DF);
    }
  }
  // The batch file comes last: it is what says that the batch is complete.
  save_checked(batch_path(index), std::move(tensors),
               {{"deltas", deltas},
                {"outcomes", batch.outcomes},
                {"layers", batch.layers},
                {"seconds", batch.seconds},
                {"contexts", batch.contexts},
                {"hparams", batch.hparams},
                {"closing", batch.closing}});
  if (index > 0) {
    std::error_code ignored;
    std::filesystem::remove(state_path(index - 1), ignored);
  }
}

std::map<std::string, at::Tensor> RunCheckpoint::editor_state(size_t batches) const {
  if (batches == 0 || !std::filesystem::exists(state_path(batches - 1))) return {};
  return load_checked(state_path(batches - 1)).tensors;
}

void RunCheckpoint::save_measured(const nlohmann::json& measured) const {
  if (reader_) return;
  write_file(folder_ / "measured.json", dump_json(measured) + "\n");
}

nlohmann::json RunCheckpoint::measured(size_t edits) const {
  const auto path = folder_ / "measured.json";
  if (!std::filesystem::exists(path)) return nullptr;
  const auto measured = nlohmann::json::parse(read_file(path), nullptr, false);
  const auto steps = measured.is_object() ? measured.value("efficacy_by_edits", nlohmann::json()) : nlohmann::json();
  const bool usable = steps.is_array() && !steps.empty() && steps.back().is_object() &&
                      measured.contains("retention") && steps.back().value("edits", edits + 1) <= edits;
  return usable ? measured : nlohmann::json();  // what is damaged is measured again where it is due
}

void RunCheckpoint::remove() const {
  if (reader_) return;
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

void reapply(const std::vector<FinishedBatch>& batches, editors::EditTransaction& transaction) {
  for (const auto& batch : batches)
    for (const auto& delta : batch.deltas) editors::apply_delta(delta, transaction);
}

}  // namespace emend::tools

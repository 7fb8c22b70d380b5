#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/models/compute_copy.h>
#include <emend/models/detail/decoder_pass.h>
#include <emend/models/model.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <array>

namespace emend::models {

Model::Model(std::unique_ptr<State> state) : state_(std::move(state)) {}
Model::~Model() = default;
Model::Model(Model&&) noexcept = default;
Model& Model::operator=(Model&&) noexcept = default;

const ModelConfig& Model::config() const noexcept {
  return state_->config;
}
const FamilySpec& Model::family() const noexcept {
  return *state_->family;
}
const devices::PlacementPlan& Model::placement() const noexcept {
  return state_->plan;
}
int Model::first_layer() const noexcept {
  return state_->first_layer;
}
at::ScalarType Model::dtype() const noexcept {
  return state_->dtype;
}
hooks::HookTable& Model::hooks() const noexcept {
  return state_->hooks;
}
bool Model::has_attachments() const noexcept {
  const auto adapted = [](const detail::LayerWeights& layer) {
    return std::ranges::any_of(layer.parts, [](const detail::Linear& part) { return part.adapter != nullptr; });
  };
  return !hooks_idle_above(*this, 0) || std::ranges::any_of(state_->layers, adapted);
}
bool Model::has_tokenizer() const noexcept {
  return state_->tokenizer != nullptr;
}
const Checkpoint& Model::checkpoint() const noexcept {
  return *state_->checkpoint;
}
const std::vector<std::string>& Model::weight_names() const noexcept {
  return state_->names;
}
std::vector<ExpectedTensor> Model::weight_table() const {
  auto table = expected_tensors(family(), config());
  EMEND_CHECK(table.size() == state_->names.size(), "a name a tensor of the family's table");
  for (size_t i = 0; i < table.size(); ++i) table[i].name = state_->names[i];
  return table;
}

int64_t Model::parameter_count() const noexcept {
  int64_t count = 0;
  for (const auto& [name, weight] : state_->weights) count += weight.tensor.numel();
  return count;
}

const Tokenizer& Model::tokenizer() const {
  if (state_->tokenizer) return *state_->tokenizer;
  throw Error(ErrorClass::kNotFound, {state_->checkpoint->path().string(), "the checkpoint has no tokenizer",
                                      "tokenizer.json, tokenizer.model, vocab.json with merges.txt, or *.tiktoken",
                                      "copy the tokenizer files of the model beside its weights"});
}

ForwardResult Model::forward(const TokenBatch& batch, const ForwardOptions& options) const {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);  // a caller's torch.autocast
  try {
    return DecoderPass(*state_, batch, options).run();
  } catch (const c10::OutOfMemoryError& error) {
    throw Error(ErrorClass::kDevice, {"forward pass", error.what_without_backtrace(),
                                      "memory for " + std::to_string(batch.tokens()) + " tokens",
                                      "use smaller batches, or spread the model over more devices"});
  }
}

at::Tensor Model::project(const at::Tensor& hidden, bool raw_head) const {
  if (hidden.dim() < 1 || hidden.size(-1) != hidden_size())
    refuse({"project", "a tensor of shape " + shape_text(hidden.sizes()),
            "[rows, " + std::to_string(hidden_size()) + "]", ""});
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return detail::project_rows(*state_, hidden.to(state_->dtype), raw_head, /*fire_hooks=*/false);
}

// "self_attn.q_proj, …": what adaptable_weights() has of the first layer, without the layer's name.
static std::string short_names(const std::vector<std::string>& weights) {
  std::string text;
  for (const std::string& name : weights) {
    const size_t number = name.find(".0.");
    if (number == std::string::npos || !name.ends_with(".weight")) continue;
    append_item(text, name.substr(number + 3, name.size() - number - 3 - 7));
  }
  return text;
}

EditSite Model::edit_site(int layer) const {
  const ModelConfig& config = state_->config;
  if (!config.no_edit_site.empty())
    throw Error(ErrorClass::kUnsupported,
                {"edit site of family " + config.family, config.no_edit_site, "one matrix that a layer's keys enter",
                 "choose a dense model, or train an adapter on the dense matrices of this one (" +
                     short_names(adaptable_weights()) + ")"});
  if (layer < 0 || layer >= config.n_layers)
    refuse({"edit site", "layer " + std::to_string(layer), "a layer from 0 to " + std::to_string(config.n_layers - 1),
            "check `layers` in the hyper-parameters against the model"});
  EditSite site;
  site.layer = layer;
  site.orientation = state_->family->orientation;
  for (const std::string& name : state_->names) {
    const State::Weight& weight = state_->weights.at(name);
    if (weight.expected.layer != layer || weight.expected.part != Part::kDown) continue;
    if (weight.expected.bias) {
      site.bias_name = name;
      continue;
    }
    site.weight_name = name;
    const bool conv1d = site.orientation == Orientation::kInOut;
    site.in_features = weight.tensor.size(conv1d ? 0 : 1);
    site.out_features = weight.tensor.size(conv1d ? 1 : 0);
  }
  return site;
}

const Model::State::Weight& Model::State::find(const std::string& name) const {
  auto it = weights.find(name);
  if (it == weights.end())
    if (const auto synonym = synonyms.find(name); synonym != synonyms.end()) it = weights.find(synonym->second);
  if (it != weights.end()) return it->second;
  throw Error(ErrorClass::kNotFound, {"weights of " + checkpoint->path().string(), "no weight \"" + name + "\"",
                                      "a tensor of the checkpoint", did_you_mean(name, names)});
}

bool Model::has_weight(const std::string& name) const noexcept {
  return state_->weights.count(name) > 0 || state_->synonyms.count(name) > 0;
}

at::Tensor Model::weight(const std::string& name) const {
  return state_->find(name).tensor;
}

std::vector<at::Tensor> Model::weight_copies(const std::string& name) const {
  const State::Weight& weight = state_->find(name);
  std::vector<at::Tensor> all{weight.tensor};
  if (weight.copy.defined()) all.push_back(weight.copy);
  return all;
}

const at::Tensor& ForwardResult::needed_logits() const {
  if (!logits.defined())
    refuse({"forward pass", "no logits: a hook ended the pass", "a pass to its end", "detach stop_after first"});
  return logits;
}

const at::Tensor& ForwardResult::needed_hidden() const {
  if (stopped)
    refuse({"forward pass", "no hidden states: a hook ended the pass", "a pass to its end", "detach stop_after first"});
  return hidden;
}

void Model::set_weight(const std::string& name, const at::Tensor& value) {
  const State::Weight& weight = state_->find(name);
  if (!value.defined()) refuse({"weight \"" + name + "\"", "no tensor", "a tensor of the weight's shape", ""});
  if (value.sizes() != weight.tensor.sizes() || !at::isFloatingType(value.scalar_type()) ||
      value.device() != weight.tensor.device()) {
    const auto place = [](const at::Tensor& x) { return shape_text(x.sizes()) + " on " + x.device().str(); };
    refuse({"weight \"" + name + "\"", std::string(c10::toString(value.scalar_type())) + " " + place(value),
            "a floating type, " + place(weight.tensor),
            value.device() == weight.tensor.device() ? "" : "move the tensor with route_like first"});
  }
  const at::NoGradGuard no_grad;
  for (at::Tensor target : weight_copies(name))
    target.copy_(devices::route_like(value, target, devices::Purpose::kWeight));
}

void detail::hash_tensor(Sha256& hash, const std::string& name, const at::Tensor& tensor) {
  const at::Tensor bytes = tensor.contiguous();
  hash.update(name + '\n' + c10::toString(bytes.scalar_type()) + ' ' + shape_text(bytes.sizes()) + '\n');
  hash.update(bytes.const_data_ptr(), bytes.nbytes());
}

Sha256 detail::hash_tensors(std::vector<std::string> names, const std::function<at::Tensor(const std::string&)>& read) {
  std::ranges::sort(names);
  Sha256 hash;
  for (const auto& name : names) hash_tensor(hash, name, read(name));
  return hash;
}

static std::string fingerprint_of(const Checkpoint& checkpoint, const ModelConfig& config) {
  return sha256_hex(checkpoint.fingerprint() + arithmetic(config).dump());
}

std::string model_fingerprint(const Checkpoint& checkpoint) {
  return fingerprint_of(checkpoint, parse_config(checkpoint.config(), checkpoint.path().string()));
}

const std::string& Model::fingerprint() const {
  const std::lock_guard lock(state_->fingerprint_mutex);
  if (state_->fingerprint.empty()) state_->fingerprint = fingerprint_of(*state_->checkpoint, state_->config);
  return state_->fingerprint;
}

std::string Model::current_fingerprint() const {
  Sha256 hash = detail::hash_tensors(state_->names, [&](const std::string& name) {
    return devices::to_host(state_->weights.at(name).tensor.detach());
  });
  hash.update(arithmetic(state_->config).dump());
  return hash.hex();
}

namespace {

constexpr std::array kAdaptable = {Part::kQkv,    Part::kQ,    Part::kK,  Part::kV,   Part::kAttnOut,
                                   Part::kGateUp, Part::kGate, Part::kUp, Part::kDown};

bool adaptable(const ExpectedTensor& expected) {
  return !expected.bias && expected.expert < 0 && std::ranges::find(kAdaptable, expected.part) != kAdaptable.end();
}

}  // namespace

std::vector<std::string> Model::adaptable_weights() const {
  std::vector<std::string> names;
  for (const auto& name : state_->names)
    if (adaptable(state_->find(name).expected)) names.push_back(name);
  return names;
}

void Model::set_adapter(const std::string& weight, std::shared_ptr<const LinearAdapter> adapter) {
  const State::Weight& entry = state_->find(weight);
  if (!adaptable(entry.expected))
    throw Error(ErrorClass::kNotFound, {weight, "not a linear layer inside a block", "one of adaptable_weights()", ""});
  if (adapter) {
    const int64_t out = entry.tensor.size(state_->conv1d() ? 1 : 0), in = entry.tensor.size(state_->conv1d() ? 0 : 1);
    const bool fits = adapter->a_RI.dim() == 2 && adapter->b_OR.dim() == 2 && adapter->a_RI.size(1) == in &&
                      adapter->b_OR.size(0) == out && adapter->a_RI.size(0) == adapter->b_OR.size(1);
    if (!fits)
      refuse({"adapter of " + weight,
              "factors " + shape_text(adapter->a_RI.sizes()) + " and " + shape_text(adapter->b_OR.sizes()),
              "[R, " + std::to_string(in) + "] and [" + std::to_string(out) + ", R]", ""});
    const auto home = entry.tensor.device();
    if (adapter->a_RI.device() != home || adapter->b_OR.device() != home)
      refuse({"adapter of " + weight,
              "factors on " + devices::to_string(adapter->a_RI.device()) + " and " +
                  devices::to_string(adapter->b_OR.device()),
              "both on " + devices::to_string(home) + ", where the weight lives",
              "route them to the weight (devices::route_like) before they are attached"});
  }
  state_->layers.at(entry.expected.layer)[entry.expected.part].adapter = std::move(adapter);
}

}  // namespace emend::models

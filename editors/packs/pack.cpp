#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/core/json.h>
#include <emend/core/safetensors.h>
#include <emend/core/setting.h>
#include <emend/core/sha256.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/editors/packs/ledger.h>
#include <emend/editors/packs/neurons_apart.h>
#include <emend/editors/packs/pack.h>
#include <emend/editors/steps/apply.h>
#include <emend/models/checkpoint.h>

#include <algorithm>
#include <cstring>
#include <set>

namespace emend::editors {
namespace {

constexpr const char* kPackFormat = "emend edit pack";

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

std::string checksum(const std::string& manifest, const NamedTensors& tensors) {
  Sha256 hash;
  hash.update(manifest);
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor bytes = tensor.contiguous();
    hash.update(name);
    hash.update(std::string(c10::toString(bytes.scalar_type())));
    for (const int64_t size : bytes.sizes()) hash.update(" " + std::to_string(size));
    hash.update(bytes.const_data_ptr(), bytes.nbytes());
  }
  return hash.hex();
}

// What identifies a fact; the questions asked about it are not part of the change.
nlohmann::json fact_summary(const datasets::Fact& fact) {
  nlohmann::json json = {
      {"case_id", fact.case_id}, {"prompt", fact.prompt}, {"subject", fact.subject}, {"target_new", fact.target_new}};
  if (fact.target_true) json["target_true"] = *fact.target_true;
  if (!fact.relation_id.empty()) json["relation_id"] = fact.relation_id;
  return json;
}

// A file of another kind claims a header beyond 4 GiB; one that was cut short or damaged further on does not.
SafetensorsFile open_pack(const std::filesystem::path& path) {
  try {
    return SafetensorsFile(path);
  } catch (const Error& error) {
    uint64_t header_bytes = 0;
    if (const MappedFile file(path); file.size() >= sizeof header_bytes)
      std::memcpy(&header_bytes, file.data(), sizeof header_bytes);
    if (error.error_class() != ErrorClass::kCorruption || header_bytes >> 32 == 0) throw;
    throw Error(ErrorClass::kCorruption,
                {path.string(), "no edit pack", "a file that emend saved as one",
                 "name the edit.safetensors of a run; if this is one, it is damaged: fetch or write it again"});
  }
}

// Reads a pack with errors that name the file.
class PackReader {
 public:
  explicit PackReader(const std::filesystem::path& path) : path_(path), file_(open_pack(path)) {}

  EditPack read() {
    if (text("format") != kPackFormat)
      refuse("format \"" + text("format") + "\"", std::string("\"") + kPackFormat + "\"");
    const int version = number_in<int>(text("version")).value_or(0);
    if (version > kPackVersion)
      throw Error(ErrorClass::kUnsupported, {path_.string(), "format version " + std::to_string(version),
                                             "at most " + std::to_string(kPackVersion), "use a newer emend"});
    if (version < 1) refuse("format version \"" + text("version") + "\"", "1 or more");
    const std::string manifest_text = text("manifest");
    try {
      read_manifest(parse_json(manifest_text, path_.string() + ": manifest"));
    } catch (const nlohmann::json::exception& error) {
      refuse(std::string("a manifest that cannot be read (") + reason_of(error) + ")", "the manifest that emend wrote");
    }
    if (tensors_.size() != file_.tensors().size())
      refuse("tensors that the manifest does not name", "only the pack's own");
    if (text("checksum") != checksum(manifest_text, tensors_))
      refuse("a checksum that does not fit the data", "an unaltered file");
    for (const auto& delta : pack_.deltas)
      if (!delta.finite()) refuse("a change of " + delta.weight + " with NaN or infinite entries", "finite numbers");
    return std::move(pack_);
  }

 private:
  [[noreturn]] void refuse(const std::string& got, const std::string& expected) const {
    throw Error(ErrorClass::kCorruption, {path_.string(), got, expected, "get the file again from where it came"});
  }
  [[nodiscard]] std::string text(const std::string& name) const {
    const auto found = file_.metadata().find(name);
    if (found == file_.metadata().end()) refuse("no \"" + name + "\" in the header", "an edit pack of emend");
    return found->second;
  }

  void read_manifest(const nlohmann::json& manifest) {
    pack_.base_fingerprint = manifest.at("base_fingerprint");
    pack_.editor = manifest.at("editor");
    pack_.hparams = manifest.at("hparams");
    pack_.facts = manifest.at("facts");
    pack_.extra = manifest.at("extra");
    if (const auto under = manifest.find("under"); under != manifest.end())
      pack_.under = {under->at("base"), under->at("edits")};
    if (!pack_.facts.is_array()) refuse("facts that are no list", "the manifest that emend wrote");
    for (const auto& fact : pack_.facts) require_fact(fact);
    if (!pack_.extra.is_object() && !pack_.extra.is_null())
      refuse("extra values that are no object", "the manifest that emend wrote");
    std::set<std::string> weights;
    for (const auto& entry : manifest.at("deltas")) {
      if (!weights.insert(entry.at("weight").get<std::string>()).second)
        refuse("weight " + entry.at("weight").dump() + " twice", "each weight once");
      pack_.deltas.push_back(read_delta(entry, std::to_string(pack_.deltas.size())));
    }
    if (manifest.contains("runtime"))
      for (const auto& entry : manifest.at("runtime")) read_runtime(entry);
  }

  // As fact_summary writes it. Who reads a pack's facts later may rely on the types.
  void require_fact(const nlohmann::json& fact) const {
    if (!fact.is_object()) refuse("facts that are no list of objects", "the manifest that emend wrote");
    for (const char* key : {"prompt", "subject", "target_new", "target_true", "relation_id"})
      if (const auto found = fact.find(key); found != fact.end() && !found->is_string())
        refuse(std::string("a fact whose ") + key + " is " + shorten(found->dump(), 40), "a string");
    if (const auto id = fact.find("case_id"); id != fact.end() && !id->is_number_integer())
      refuse("a fact whose case_id is " + shorten(id->dump(), 40), "an integer");
  }

  void read_runtime(const nlohmann::json& entry) {
    RuntimePart part;
    part.kind = entry.at("kind");
    part.version = entry.at("version");
    part.values = entry.at("values");
    const std::string prefix = "runtime." + std::to_string(pack_.runtime.size()) + ".";
    for (const auto& [name, shape] : entry.at("tensors").items())
      part.tensors.emplace(name, tensor(prefix + name, shape.get<std::vector<int64_t>>(), /*floating=*/false));
    for (const auto& [name, value] : part.tensors)
      if (!at::isfinite(value).all().item<bool>())
        refuse("tensor \"" + prefix + name + "\" with entries that are not finite", "finite numbers");
    pack_.runtime.push_back(std::move(part));
  }

  WeightDelta read_delta(const nlohmann::json& entry, const std::string& number) {
    WeightDelta delta;
    delta.weight = entry.at("weight");
    delta.layer = entry.at("layer");
    const std::string orientation = entry.at("orientation"), form = entry.at("form");
    if (orientation != "out-in" && orientation != "in-out")
      refuse("orientation \"" + orientation + "\"", "out-in or in-out");
    delta.orientation = orientation == "in-out" ? models::Orientation::kInOut : models::Orientation::kOutIn;
    const auto shape = entry.at("shape").get<std::vector<int64_t>>();
    if (form == "factors") {
      const auto rank = entry.at("rank").get<int64_t>();
      if (shape.size() != 2) refuse("factors of a weight without two dimensions", "[D,F]");
      delta.left_DR = tensor(number + ".left", {shape[0], rank});
      delta.right_FR = tensor(number + ".right", {shape[1], rank});
    } else if (form == "dense") {
      if (shape.empty() || shape.size() > 2)
        refuse("a change of " + std::to_string(shape.size()) + " dimensions", "one or two");
      delta.dense_DF = tensor(number + ".dense", shape);
    } else {
      refuse("form \"" + form + "\"", "factors or dense");
    }
    return delta;
  }

  at::Tensor tensor(const std::string& name, const std::vector<int64_t>& shape, bool floating = true) {
    if (!file_.contains(name)) refuse("no tensor \"" + name + "\"", "every tensor that the manifest names");
    at::Tensor value = file_.tensor(name);
    if (value.sizes() != at::IntArrayRef(shape))
      refuse("tensor \"" + name + "\" of another shape than the manifest says", "the shape of the manifest");
    if (floating && !at::isFloatingType(value.scalar_type()))
      refuse("tensor \"" + name + "\" of type " + c10::toString(value.scalar_type()), "floating point");
    tensors_.emplace_back(name, value);
    return value.clone();
  }

  std::filesystem::path path_;
  SafetensorsFile file_;
  EditPack pack_;
  NamedTensors tensors_;  // each once: the manifest's names have numbers of their own
};

// Describes the runtime parts and adds their tensors, as they are, to what is written.
nlohmann::json runtime_manifest(const EditPack& pack, NamedTensors& tensors) {
  auto list = nlohmann::json::array();
  for (const auto& part : pack.runtime) {
    auto shapes = nlohmann::json::object();
    const std::string prefix = "runtime." + std::to_string(list.size()) + ".";
    for (const auto& [name, value] : part.tensors) {
      shapes[name] = value.sizes().vec();
      tensors.emplace_back(prefix + name, devices::to_host(value.detach(), devices::Purpose::kDelta).contiguous());
    }
    list.push_back({{"kind", part.kind}, {"version", part.version}, {"values", part.values}, {"tensors", shapes}});
  }
  return list;
}

}  // namespace

void require_shapes(const models::Model& model, const EditPack& pack, const std::string& where) {
  for (const auto& delta : pack.deltas) {
    at::Tensor weight = model.weight(delta.weight);
    if (weight.dim() == 2 && delta.orientation == models::Orientation::kInOut) weight = weight.t();
    if (weight.sizes() == at::IntArrayRef(delta.shape())) continue;
    refuse({where.empty() ? delta.weight : where + ": " + delta.weight, "a change of another shape",
            "the weight's shape", "apply the pack to the model it was made from"});
  }
}

bool is_pack(const SafetensorsFile& file) {
  return file.metadata().contains("manifest");
}

void require_base(const EditPack& pack, const std::string& fingerprint, const ApplyPackOptions& options,
                  const std::string& where, const Lineage& here) {
  constexpr size_t kShortest = 8;
  const auto in_force = [&](const std::string& id) { return std::ranges::count(here.edits, id) > 0; };
  if (!pack.id.empty() && in_force(pack.id))
    refuse({where, "the edit " + pack.id + " is already in force", "", "revert it first, or apply another pack"});
  // A merge names the model of one of its parts: where the edits in force are known, they decide.
  const bool known = here.base == pack.root() && pack.base_fingerprint != pack.root();
  if (options.force || (pack.base_fingerprint == fingerprint && !known)) return;
  const std::string& own = here.base.empty() ? fingerprint : here.base;
  bool same_base = pack.root() == own;
  auto others = here.forms;
  others.insert(others.end(), options.accepted_bases.begin(), options.accepted_bases.end());
  for (const auto& given : others) {
    const std::string accepted = lower(given);
    if (accepted.size() < kShortest) continue;
    if (pack.base_fingerprint.starts_with(accepted)) return;
    same_base = same_base || pack.root().starts_with(accepted);
  }
  if (!same_base) {
    const std::string base = pack.root().substr(0, 12);
    if (const auto room = pack.extra.find("spare_neurons"); room != pack.extra.end())
      refuse({where, "a pack made for the model " + base + ", with " + room->dump() + " neurons more in every MLP",
              "that model, not " + own.substr(0, 12),
              "make room first (emend convert, with " + room->dump() + " spare neurons) and use that folder"});
    refuse({where, "a pack made for the model " + base, "one for this model, " + own.substr(0, 12),
            "use the pack's own model; if this is the same model in another form, accept that base by name (" +
                setting("accept_base", base) + ") or use " + setting("force")});
  }
  std::string missing;
  for (const auto& id : pack.under.edits)
    if (!in_force(id)) append_item(missing, id);
  if (!missing.empty())
    refuse({where, "a pack made on top of the edits " + missing, "a model with these edits in force",
            "apply them first, or use " + setting("force")});
}

std::string EditPack::runtime_kinds() const {
  return join(runtime, ", ", &RuntimePart::kind);
}

EditPack EditPack::from_results(const models::Model& model, std::span<const EditResult> results,
                                std::span<const datasets::Fact> facts) {
  EditPack pack;
  pack.base_fingerprint = model.fingerprint();
  pack.under = lineage_of(model.checkpoint().path());
  if (pack.under.edits.empty()) pack.under = {};
  pack.facts = nlohmann::json::array();
  pack.extra = nlohmann::json::object();
  if (const int64_t spare = model.checkpoint().spare_neurons(); spare > 0) pack.extra["spare_neurons"] = spare;
  for (const auto& fact : facts) pack.facts.push_back(fact_summary(fact));
  std::vector<WeightDelta> deltas;
  for (const auto& result : results) {
    pack.editor = result.editor;
    pack.hparams = result.hparams;
    pack.extra["seed"] = result.seed;
    pack.extra["engine"] = to_string(result.engine);
    if (result.contexts) pack.extra["contexts"] = result.contexts->to_json();
    deltas.insert(deltas.end(), result.deltas.begin(), result.deltas.end());
  }
  pack.deltas = merge_deltas(deltas);
  return pack;
}

void save_pack(const std::filesystem::path& path, const EditPack& pack) {
  NamedTensors tensors;
  nlohmann::json deltas = nlohmann::json::array();
  for (const auto& delta : pack.deltas) {
    const std::string number = std::to_string(deltas.size());
    const auto add = [&](const char* part, const at::Tensor& value) {
      tensors.emplace_back(number + "." + part,
                           devices::to_host(value.detach(), devices::Purpose::kDelta).to(at::kDouble).contiguous());
    };
    nlohmann::json entry = {{"weight", delta.weight},
                            {"layer", delta.layer},
                            {"orientation", delta.orientation == models::Orientation::kInOut ? "in-out" : "out-in"},
                            {"shape", delta.shape()},
                            {"form", delta.low_rank() ? "factors" : "dense"}};
    if (delta.low_rank()) {
      entry["rank"] = delta.rank();
      add("left", delta.left_DR);
      add("right", delta.right_FR);
    } else {
      add("dense", delta.dense_DF);
    }
    deltas.push_back(std::move(entry));
  }
  nlohmann::json manifest = {{"base_fingerprint", pack.base_fingerprint},
                             {"editor", pack.editor},
                             {"hparams", pack.hparams},
                             {"facts", pack.facts},
                             {"extra", pack.extra},
                             {"deltas", deltas}};
  if (!pack.under.edits.empty()) manifest["under"] = {{"base", pack.under.base}, {"edits", pack.under.edits}};
  if (!pack.runtime.empty()) manifest["runtime"] = runtime_manifest(pack, tensors);
  const std::string text = manifest.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  write_safetensors(path, tensors,
                    {{"format", kPackFormat},
                     {"version", std::to_string(pack.runtime.empty() ? 1 : kPackVersion)},
                     {"manifest", text},
                     {"checksum", checksum(text, tensors)}});
}

std::string describe_edit(const EditPack& pack) {
  nlohmann::ordered_json text = {{"editor", pack.editor},
                                 {"base", pack.root()},
                                 {"facts", pack.facts},
                                 {"hparams", pack.hparams},
                                 {"extra", pack.extra}};
  if (const auto neurons = neurons_of(pack); !neurons.empty()) text["neurons"] = neurons;
  return text.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

EditPack described_edit(const std::string& line, const std::string& where) {
  const auto text = parse_json(line, where);
  EditPack pack;
  try {
    text.at("editor").get_to(pack.editor);
    pack.facts = text.at("facts").get<std::vector<nlohmann::json>>();
    if (text.contains("neurons")) text.at("neurons").get_to(pack.described_neurons);
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorClass::kCorruption, {where, std::string("no edit that emend describes (") + reason_of(error) + ")",
                                          "an editor and its facts", "write the file again"});
  }
  return pack;
}

EditPack load_pack(const std::filesystem::path& path) {
  EditPack pack = PackReader(path).read();
  pack.id = pack_id(path);
  return pack;
}

std::string pack_id(const std::filesystem::path& path) {
  constexpr size_t kDigits = 12;
  return sha256_hex(read_file(path)).substr(0, kDigits);
}

std::unique_ptr<EditTransaction> apply_pack(models::Model& model, const EditPack& pack,
                                            const ApplyPackOptions& options) {
  require_base(pack, model.fingerprint(), options, "edit pack", lineage_of(model.checkpoint().path()));
  if (!pack.runtime.empty() && !options.runtime_apart)
    throw Error(ErrorClass::kUnsupported,
                {"edit pack", "an edit with a part beside the weights (" + pack.runtime_kinds() + ")",
                 "a change of weights", "keep it as a pack: generate, chat, eval and serve load it"});
  require_shapes(model, pack);
  auto transaction = std::make_unique<EditTransaction>(model);
  for (const auto& delta : pack.deltas) (void)apply_delta(delta, *transaction);
  return transaction;
}

}  // namespace emend::editors

#include <ATen/ATen.h>
#include <emend/core/cache_folder.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/mapped.h>
#include <emend/core/sha256.h>
#include <emend/core/text.h>
#include <emend/editors/detail/ledger_state.h>
#include <emend/editors/packs/neurons_apart.h>
#include <emend/models/checkpoint.h>
#include <emend/models/config.h>
#include <emend/models/gguf/gguf_file.h>
#include <emend/models/gguf/gguf_writer.h>

#include <algorithm>
#include <set>

namespace emend::editors::detail {
namespace {

constexpr int kLedgerVersion = 1;
constexpr size_t kIdDigits = 12;

bool is_id(const std::string& id) {
  return id.size() == kIdDigits && id.find_first_not_of("0123456789abcdef") == std::string::npos;
}

// Ids become file names, so nothing else than an id may pass for one.
std::vector<std::string> read_ids(const nlohmann::json& list, const StoredState& state) {
  const auto ids = list.get<std::vector<std::string>>();
  std::set<std::string> seen;
  for (const auto& id : ids)
    if (!state.known.contains(id) || !seen.insert(id).second)
      throw std::runtime_error("\"" + id + "\" is unknown or there twice");
  return ids;
}

// Of everything else in the file: what it says of the packs must not be believed in part.
std::string checksum_of(const nlohmann::json& state) {
  return sha256_hex(state.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace

StoredState read_state(const std::filesystem::path& path) {
  try {
    auto json = read_json(path, {.expected = "the file that emend wrote",
                                 .advice = "restore the folder from its source and apply the packs again"});
    if (json.at("version") > kLedgerVersion)
      throw Error(ErrorClass::kUnsupported,
                  {path.string(), "version " + json.at("version").dump(), "version 1", "use a newer emend"});
    if (const auto sum = json.find("checksum"); sum != json.end()) {  // files of earlier versions have none
      const std::string written = *sum;
      json.erase(sum);
      if (written != checksum_of(json)) throw std::runtime_error("it was changed by hand, or in part");
    }
    StoredState state;
    state.base = json.at("base").get<std::string>();
    for (const auto& [id, entry] : json.at("packs").items()) {
      if (!is_id(id)) throw std::runtime_error("\"" + id + "\" is no id");
      state.known[id] = {
          id,
          false,
          entry.at("editor").get<std::string>(),
          entry.at("facts").get<int64_t>(),
          entry.at("subjects").get<std::vector<std::string>>(),
          entry.at("weights").get<std::vector<std::string>>(),
          entry.at("applied_at").get<std::string>(),
          entry.value("runtime", false),
          entry.contains("survived") && entry["survived"].is_number() ? entry["survived"].get<double>() : 1,
          entry.value("under", std::vector<std::string>())};
    }
    state.active = read_ids(json.at("active"), state);
    if (json.contains("pending")) state.pending = read_ids(json.at("pending"), state);
    if (json.contains("forms")) json.at("forms").get_to(state.forms);
    return state;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw Error(ErrorClass::kCorruption,
                {path.string(), std::string("a damaged ledger (") + reason_of(error) + ")", "the file that emend wrote",
                 "restore the folder from its source and apply the packs again"});
  }
}

std::string StoredState::text() const {
  nlohmann::json packs = nlohmann::json::object();
  for (const auto& [id, entry] : known) {
    packs[id] = {{"editor", entry.editor},    {"facts", entry.facts},           {"subjects", entry.subjects},
                 {"weights", entry.weights},  {"applied_at", entry.applied_at}, {"runtime", entry.runtime},
                 {"survived", entry.survived}};
    if (!entry.under.empty()) packs[id]["under"] = entry.under;
  }
  nlohmann::json state = {{"version", kLedgerVersion}, {"base", base}, {"active", active}, {"packs", packs}};
  if (pending) state["pending"] = *pending;
  if (!forms.empty()) state["forms"] = forms;
  state["checksum"] = checksum_of(state);
  return state.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

// Earlier versions wrote no checksum.
SafetensorsFile open_originals(const std::filesystem::path& path) {
  if (std::error_code none; !std::filesystem::exists(path, none))
    throw Error(ErrorClass::kCorruption,
                {path.string(), "missing", "the weights as they were before the edits in force",
                 "put the file back, or restore the folder from its source and apply the packs again"});
  SafetensorsFile file(path);
  if (file.metadata().contains("checksum")) try {
      require_intact(file);
    } catch (const Error&) {
      throw Error(ErrorClass::kCorruption,
                  {path.string(), "damaged: its checksum does not fit",
                   "the weights as they were before the edits in force, which nothing else holds",
                   "restore the file from a copy, or the folder from its source, and apply the packs again; keep the "
                   "damaged file, in which most weights may be whole"});
    }
  return file;
}

// A first change that was killed leaves originals of weights that are as they were; one whose ledger.json was lost
// leaves the only copy of what the edits replaced.
void require_no_originals(const std::filesystem::path& model_folder) {
  const auto path = model_folder / kFolder / kOriginals;
  if (!std::filesystem::exists(path)) return;
  const SafetensorsFile originals = open_originals(path);
  const auto files = models::weight_files(model_folder);
  for (const auto& [weight, info] : originals.tensors()) {
    const auto file = files.find(weight);
    if (file == files.end() || at::equal(SafetensorsFile(file->second).tensor(weight), originals.tensor(weight)))
      continue;
    throw Error(ErrorClass::kCorruption,
                {(model_folder / kFolder / kState).string(), "missing, beside originals that the weights differ from",
                 "the list of the edits in force",
                 "put the file back, or restore the folder from its source and apply the packs again"});
  }
}

FolderWeights::FolderWeights(const std::filesystem::path& model_folder) : files(models::weight_files(model_folder)) {
  const auto config = models::parse_config(read_json(model_folder / "config.json"), model_folder.string());
  tied = models::tied_names(models::find_family(config.model_type, model_folder.string()), config,
                            mapped(files, &decltype(files)::value_type::first));
}

void respell(EditPack& pack, const FolderWeights& weights) {
  const auto& [files, tied] = weights;
  for (auto& delta : pack.deltas) {
    const auto same = [&](const auto& file) { return same_weight(file.first, delta.weight); };
    if (!files.contains(delta.weight) && std::ranges::count_if(files, same) == 1)
      delta.weight = std::ranges::find_if(files, same)->first;
  }
  for (const auto& head : tied.heads)
    for (size_t i = 0, count = pack.deltas.size(); i < count; ++i)
      if (pack.deltas[i].weight == tied.embedding) {
        pack.deltas.push_back(WeightDelta(pack.deltas[i]));
        pack.deltas.back().weight = head;
      }
}

EditPack kept_pack(const std::filesystem::path& ledger, const std::string& id) {
  const auto path = ledger / "packs" / (id + ".safetensors");
  auto pack = load_pack(path);
  if (pack.id != id)
    throw Error(ErrorClass::kCorruption,
                {path.string(), "the edit " + pack.id, "the edit " + id, "put the pack back that was applied"});
  return pack;
}

std::vector<NamedPack> load_packs(const std::filesystem::path& ledger, const Lineage& lineage) {
  std::vector<NamedPack> packs;
  for (const auto& id : lineage.edits) {
    packs.push_back({"edit " + id, kept_pack(ledger, id)});
    packs.back().pack.rebase(lineage.base);
  }
  if (packs.size() > 1) move_apart(packs, originals_in(ledger / kOriginals));
  return packs;
}

}  // namespace emend::editors::detail

namespace emend::editors {

using detail::StoredState;

// Empty where there is no ledger. While a change is under way nobody knows what the weights hold.
static StoredState state_of(const std::filesystem::path& model_folder) {
  const auto path = model_folder / detail::kFolder / detail::kState;
  std::error_code error;
  if (model_folder.empty() || !std::filesystem::exists(path, error)) return {};
  StoredState state = detail::read_state(path);
  if (state.pending)
    throw Error(ErrorClass::kCorruption,
                {model_folder.string(), "a change of its edits that is not finished", "a finished one",
                 "wait for the process that changes it, or list the folder's edits: that finishes what an interrupted "
                 "one began"});
  return state;
}

bool has_runtime_edits(const std::filesystem::path& model_folder) {
  const StoredState state = state_of(model_folder);
  return std::ranges::any_of(state.active, [&](const auto& id) { return state.known.at(id).runtime; });
}

Lineage lineage_of(const std::filesystem::path& model_folder) {
  StoredState state = state_of(model_folder);
  if (state.active.empty()) return {};  // what stands in the folder is the original
  return {std::move(state.base), std::move(state.active), std::move(state.forms)};
}

std::vector<NamedPack> packs_in_force(const std::filesystem::path& model_folder) {
  return detail::load_packs(model_folder / detail::kFolder, lineage_of(model_folder));
}

std::vector<std::string> edits_in_weights(const std::filesystem::path& model_folder,
                                          std::vector<std::string>& left_out) {
  std::vector<std::string> edits;
  for (const auto& [name, pack] : packs_in_force(model_folder)) {
    if (!pack.deltas.empty()) edits.push_back(describe_edit(pack));
    if (!pack.runtime.empty() && !pack.deltas.empty())
      left_out.push_back("the part of " + name + " that lies beside the weights (" + pack.runtime_kinds() +
                         ") is left out");
    else if (!pack.runtime.empty())
      left_out.push_back(name + " of " + pack.editor + " lies beside the weights and is left out, with its " +
                         counted(pack.facts.size(), "fact"));
  }
  return edits;
}

std::vector<NamedPack> described_edits(const std::filesystem::path& gguf) {
  std::vector<NamedPack> edits;
  if (!std::filesystem::is_regular_file(gguf)) return edits;
  for (const auto& text : models::GgufFile(gguf).texts(models::kGgufEdits)) {
    const std::string name = "edit " + std::to_string(edits.size() + 1) + " of " + gguf.string();
    edits.push_back({name, described_edit(text, name)});
  }
  return edits;
}

std::vector<NamedPack> edits_of(const std::filesystem::path& model) {
  return std::filesystem::is_regular_file(model) ? described_edits(model) : packs_in_force(model);
}

}  // namespace emend::editors

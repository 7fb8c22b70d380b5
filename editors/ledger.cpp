#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/safetensors.h>
#include <emend/core/sha256.h>
#include <emend/editors/ledger.h>
#include <emend/models/checkpoint.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <set>

namespace emend::editors {
namespace {

constexpr int kLedgerVersion = 1;

std::string now_text() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

// Which file of the folder holds each tensor.
std::map<std::string, std::filesystem::path> files_of(const std::filesystem::path& folder) {
  std::map<std::string, std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    const SafetensorsFile file(entry.path());
    for (const auto& [name, info] : file.tensors()) files.emplace(name, entry.path());
  }
  return files;
}

// A pack names weights as its model had them; a folder may carry or lack the family's base prefix.
const std::filesystem::path& file_of(const std::map<std::string, std::filesystem::path>& files,
                                     const std::string& weight, const std::filesystem::path& folder) {
  const auto it = files.find(weight);
  if (it != files.end()) return it->second;
  std::vector<std::string> names;
  for (const auto& [name, path] : files) names.push_back(name);
  const std::string close = closest_name(weight, names);
  throw Error(ErrorClass::kInvalidArgument, {folder.string(), "no weight \"" + weight + "\", which the pack changes",
                                             "the model that the pack was made for",
                                             close.empty() ? "" : "the closest name here is \"" + close + "\""});
}

// Σ of the deltas added in float64, one rounding to float32 a pack, one to the file's dtype at the end: what
// apply_delta and save_model do to a model in memory.
at::Tensor add_delta(const at::Tensor& weight, const WeightDelta& delta, const std::filesystem::path& folder) {
  at::Tensor change = delta.matrix();
  if (delta.orientation == models::Orientation::kInOut && change.dim() == 2) change = change.t();
  if (change.sizes() != weight.sizes())
    throw Error(ErrorClass::kInvalidArgument,
                {folder.string(), "weight \"" + delta.weight + "\" has another shape than the pack's change",
                 "the model that the pack was made for", ""});
  const auto compute_dtype = weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return (weight.to(at::kDouble) + change).to(compute_dtype);
}

void copy_one(const std::filesystem::path& from, const std::filesystem::path& to) {
  std::error_code error;
  std::filesystem::create_hard_link(std::filesystem::canonical(from), to, error);
  if (!error) return;
  std::filesystem::copy_file(from, to, error);
  if (error)
    throw Error(ErrorClass::kIo, {to.string(), "cannot copy " + from.string() + " (" + error.message() + ")", "",
                                  "free some space or choose another folder"});
}

}  // namespace

std::vector<std::filesystem::path> active_runtime_packs(const std::filesystem::path& model_folder) {
  std::vector<std::filesystem::path> packs;
  const auto ledger = model_folder / ".emend";
  if (!std::filesystem::exists(ledger / "ledger.json")) return packs;
  const auto state = nlohmann::json::parse(read_file(ledger / "ledger.json"), nullptr, false);
  try {
    for (const auto& id : state.at("active").get<std::vector<std::string>>())
      if (state.at("packs").at(id).value("runtime", false)) packs.push_back(ledger / "packs" / (id + ".safetensors"));
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorClass::kCorruption,
                {(ledger / "ledger.json").string(), "damaged ledger", "", std::string(error.what())});
  }
  return packs;
}

Ledger::Ledger(std::filesystem::path model_folder, const Log& log)
    : folder_(std::move(model_folder)), ledger_(folder_ / ".emend"), log_(log) {
  if (!std::filesystem::is_directory(folder_))
    throw Error(ErrorClass::kNotFound, {folder_.string(), "not a model folder", "a Hugging Face folder",
                                        "a GGUF file has no ledger: write the edited model elsewhere with --out"});
  std::error_code error;
  std::filesystem::create_directories(ledger_ / "packs", error);
  lock_ = ::open((ledger_ / "lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (lock_ < 0)
    throw Error(ErrorClass::kIo, {ledger_.string(), "cannot write to the model folder", "a writable folder",
                                  "copy the model, or use --out"});
  if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    ::close(lock_);
    throw Error(ErrorClass::kInvalidArgument,
                {folder_.string(), "another process is changing this model", "", "wait for it to end"});
  }
  const auto state_path = ledger_ / "ledger.json";
  if (!std::filesystem::exists(state_path)) {
    base_ = models::model_fingerprint(*models::open_checkpoint(folder_.string()));
    return;
  }
  const auto state = nlohmann::json::parse(read_file(state_path), nullptr, false);
  try {
    if (state.at("version").get<int>() > kLedgerVersion)
      throw Error(ErrorClass::kUnsupported,
                  {state_path.string(), "version " + state.at("version").dump(), "version 1", "use a newer emend"});
    base_ = state.at("base").get<std::string>();
    active_ = state.at("active").get<std::vector<std::string>>();
    for (const auto& [id, entry] : state.at("packs").items())
      known_[id] = {id,
                    false,
                    entry.at("editor").get<std::string>(),
                    entry.at("facts").get<int64_t>(),
                    entry.at("subjects").get<std::vector<std::string>>(),
                    entry.at("weights").get<std::vector<std::string>>(),
                    entry.at("applied_at").get<std::string>(),
                    entry.value("runtime", false)};
    if (state.contains("pending")) {
      log_.warning("ledger.pending", folder_.string() + ": finishing a change that was interrupted");
      change(state.at("pending").get<std::vector<std::string>>());
    }
  } catch (const nlohmann::json::exception& e) {
    throw Error(ErrorClass::kCorruption, {state_path.string(), "damaged ledger", "", std::string(e.what())});
  }
}

Ledger::~Ledger() {
  if (lock_ < 0) return;
  std::error_code ignored;
  if (known_.empty()) std::filesystem::remove_all(ledger_, ignored);  // nothing was ever applied: leave no trace
  ::close(lock_);
}

std::vector<LedgerEntry> Ledger::entries() const {
  std::vector<LedgerEntry> list;
  for (const auto& id : active_) {
    list.push_back(known_.at(id));
    list.back().active = true;
  }
  for (const auto& [id, entry] : known_)
    if (std::find(active_.begin(), active_.end(), id) == active_.end()) list.push_back(entry);
  return list;
}

std::string Ledger::resolve(const std::string& id_or_path) const {
  std::string wanted = id_or_path;
  if (std::filesystem::is_regular_file(id_or_path)) wanted = sha256_hex(read_file(id_or_path)).substr(0, 12);
  std::vector<std::string> matches;
  for (const auto& [id, entry] : known_)
    if (id.rfind(wanted, 0) == 0) matches.push_back(id);
  if (matches.size() == 1) return matches[0];
  std::string list;
  for (const auto& [id, entry] : known_) list += (list.empty() ? "" : ", ") + id;
  throw Error(ErrorClass::kNotFound,
              {folder_.string(), (matches.empty() ? "no edit \"" : "several edits begin with \"") + id_or_path + "\"",
               list.empty() ? "an edit of this model; it has none" : "one of " + list, "emend list shows them"});
}

std::string Ledger::apply(const std::filesystem::path& pack_path, const std::string& accepted_base, bool force) {
  const EditPack pack = load_pack(pack_path);
  const std::string id = sha256_hex(read_file(pack_path)).substr(0, 12);
  if (std::find(active_.begin(), active_.end(), id) != active_.end())
    throw Error(ErrorClass::kInvalidArgument, {folder_.string(), "the edit " + id + " is already in force", "",
                                               "revert it first, or apply another pack"});
  if (!force && pack.base_fingerprint != base_ && pack.base_fingerprint != accepted_base)
    throw Error(ErrorClass::kInvalidArgument,
                {pack_path.string(), "made for the model " + pack.base_fingerprint.substr(0, 12),
                 "the model in " + folder_.string() + ", which is " + base_.substr(0, 12),
                 "use the pack's own model, or --force if you know that they agree"});
  LedgerEntry entry;
  entry.id = id;
  entry.editor = pack.editor;
  entry.facts = static_cast<int64_t>(pack.facts.size());
  for (const auto& fact : pack.facts)
    if (entry.subjects.size() < 3) entry.subjects.push_back(fact.value("subject", ""));
  for (const auto& delta : pack.deltas) entry.weights.push_back(delta.weight);
  entry.runtime = !pack.runtime.empty();
  const auto files = files_of(folder_);
  for (const auto& delta : pack.deltas) {  // shapes are checked before anything is written
    const SafetensorsFile file(file_of(files, delta.weight, folder_));
    (void)add_delta(file.tensor(delta.weight), delta, folder_);
  }
  keep_originals(entry.weights);
  write_file(ledger_ / "packs" / (id + ".safetensors"), read_file(pack_path));
  known_[id] = entry;
  auto active = active_;
  active.push_back(id);
  known_[id].applied_at = now_text();
  change(active);
  return id;
}

std::string Ledger::revert(const std::string& id_or_path) {
  const std::string id = resolve(id_or_path);
  auto active = active_;
  const auto it = std::find(active.begin(), active.end(), id);
  if (it == active.end())
    throw Error(ErrorClass::kInvalidArgument,
                {folder_.string(), "the edit " + id + " is not in force", "", "emend list shows what is"});
  active.erase(it);
  known_[id].applied_at = now_text();
  change(active);
  return id;
}

void Ledger::revert_all() {
  change({});
  if (known_.empty()) return;
  const std::string now = models::model_fingerprint(*models::open_checkpoint(folder_.string()));
  if (now != base_)
    throw Error(ErrorClass::kCorruption,
                {folder_.string(), "without any edit the fingerprint is " + now.substr(0, 12),
                 base_.substr(0, 12) + ", as before the first edit",
                 "another program has changed the weights; restore the folder from its source"});
}

void Ledger::reorder(const std::vector<std::string>& ids) {
  std::vector<std::string> order;
  for (const auto& id : ids) order.push_back(resolve(id));
  auto a = order, b = active_;
  std::sort(a.begin(), a.end());
  std::sort(b.begin(), b.end());
  if (a != b)
    throw Error(ErrorClass::kInvalidArgument, {folder_.string(), "the new order names other edits than those in force",
                                               "each edit in force once", "emend list shows them"});
  change(order);
}

void Ledger::change(const std::vector<std::string>& active) {
  std::set<std::string> weights;
  for (const std::vector<std::string>* list : {&std::as_const(active_), &active})
    for (const auto& id : *list)
      for (const auto& weight : known_.at(id).weights) weights.insert(weight);
  {
    write_state();
    auto state = nlohmann::json::parse(read_file(ledger_ / "ledger.json"));
    state["pending"] = active;
    write_file(ledger_ / "ledger.json", state.dump(1) + "\n");
  }
  rebuild(active, {weights.begin(), weights.end()});
  active_ = active;
  write_state();
}

void Ledger::keep_originals(const std::vector<std::string>& weights) {
  const auto path = ledger_ / "originals.safetensors";
  std::vector<std::pair<std::string, at::Tensor>> kept;
  std::set<std::string> have;
  std::optional<SafetensorsFile> old;
  if (std::filesystem::exists(path)) {
    old.emplace(path);
    for (const auto& [name, info] : old->tensors()) {
      kept.emplace_back(name, old->tensor(name));
      have.insert(name);
    }
  }
  const auto files = files_of(folder_);
  bool added = false;
  for (const auto& weight : weights)
    if (have.insert(weight).second) {
      kept.emplace_back(weight, SafetensorsFile(file_of(files, weight, folder_)).tensor(weight));
      added = true;
    }
  if (added) write_safetensors(path, kept, {{"format", "emend originals"}, {"base", base_}});
}

void Ledger::rebuild(const std::vector<std::string>& active, const std::vector<std::string>& weights) {
  if (weights.empty()) return;
  const SafetensorsFile originals(ledger_ / "originals.safetensors");
  std::map<std::string, at::Tensor> values;
  for (const auto& weight : weights) values[weight] = originals.tensor(weight);
  for (const auto& id : active)
    for (const auto& delta : load_pack(ledger_ / "packs" / (id + ".safetensors")).deltas)
      values[delta.weight] = add_delta(values[delta.weight], delta, folder_);
  std::map<std::filesystem::path, std::map<std::string, at::Tensor>> by_file;
  const auto files = files_of(folder_);
  for (auto& [weight, value] : values)
    by_file[file_of(files, weight, folder_)][weight] = value.to(originals.tensor(weight).scalar_type());
  for (const auto& [path, replacements] : by_file) patch_safetensors(path, path, replacements);
}

void Ledger::write_state() const {
  nlohmann::json packs = nlohmann::json::object();
  for (const auto& [id, entry] : known_)
    packs[id] = {{"editor", entry.editor},   {"facts", entry.facts},           {"subjects", entry.subjects},
                 {"weights", entry.weights}, {"applied_at", entry.applied_at}, {"runtime", entry.runtime}};
  const nlohmann::json state = {{"version", kLedgerVersion}, {"base", base_}, {"active", active_}, {"packs", packs}};
  write_file(ledger_ / "ledger.json", state.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

void Ledger::copy_model_folder(const std::filesystem::path& from, const std::filesystem::path& to) {
  std::error_code error;
  if (std::filesystem::exists(to) && !std::filesystem::is_empty(to, error))
    throw Error(ErrorClass::kInvalidArgument,
                {to.string(), "the folder exists and is not empty", "a new or empty folder", "choose another --out"});
  std::filesystem::create_directories(to, error);
  if (error)
    throw Error(ErrorClass::kIo,
                {to.string(), "cannot create the folder (" + error.message() + ")", "", "choose another --out"});
  for (const auto& entry : std::filesystem::directory_iterator(from))
    if (entry.is_regular_file()) copy_one(entry.path(), to / entry.path().filename());
}

}  // namespace emend::editors

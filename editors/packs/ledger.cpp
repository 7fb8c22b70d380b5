#include <emend/core/atomic_file.h>
#include <emend/core/cache_folder.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/link_or_copy.h>
#include <emend/core/safetensors.h>
#include <emend/core/sha256.h>
#include <emend/core/text.h>
#include <emend/editors/packs/ledger.h>
#include <emend/models/checkpoint.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <set>
#include <stdexcept>

namespace emend::editors {
namespace {

constexpr int kLedgerVersion = 1;
constexpr size_t kIdDigits = 12;

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

// How much of a change is left after rounding, summed over weights: ⟨written, ΔW⟩ / ‖ΔW‖².
struct Rounding {
  double projection = 0, square = 0;

  void add(const at::Tensor& before, const at::Tensor& after, const WeightDelta& delta) {
    at::Tensor change = delta.matrix();
    if (delta.orientation == models::Orientation::kInOut && change.dim() == 2) change = change.t();
    const at::Tensor written = after.to(before.scalar_type()).to(at::kDouble) - before.to(at::kDouble);
    projection += (written * change).sum().item<double>();
    square += change.square().sum().item<double>();
  }
  [[nodiscard]] double survived() const { return square > 0 ? projection / square : 1; }
};

// Earlier versions wrote no checksum.
SafetensorsFile open_originals(const std::filesystem::path& path) {
  SafetensorsFile file(path);
  if (file.metadata().contains("checksum")) require_intact(file);
  return file;
}

// What ledger.json says.
struct StoredState {
  std::string base;
  std::vector<std::string> active;
  std::map<std::string, LedgerEntry> known;
  std::optional<std::vector<std::string>> pending;
};

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

StoredState read_state(const std::filesystem::path& path) {
  try {
    const auto json = read_json(path, {.expected = "the file that emend wrote",
                                       .advice = "restore the folder from its source and apply the packs again"});
    if (json.at("version").get<int>() > kLedgerVersion)
      throw Error(ErrorClass::kUnsupported,
                  {path.string(), "version " + json.at("version").dump(), "version 1", "use a newer emend"});
    StoredState state;
    state.base = json.at("base").get<std::string>();
    for (const auto& [id, entry] : json.at("packs").items()) {
      if (!is_id(id)) throw std::runtime_error("\"" + id + "\" is no id");
      state.known[id] = {id,
                         false,
                         entry.at("editor").get<std::string>(),
                         entry.at("facts").get<int64_t>(),
                         entry.at("subjects").get<std::vector<std::string>>(),
                         entry.at("weights").get<std::vector<std::string>>(),
                         entry.at("applied_at").get<std::string>(),
                         entry.value("runtime", false),
                         entry.value("survived", 1.0)};
    }
    state.active = read_ids(json.at("active"), state);
    if (json.contains("pending")) state.pending = read_ids(json.at("pending"), state);
    return state;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw Error(ErrorClass::kCorruption,
                {path.string(), std::string("a damaged ledger (") + error.what() + ")", "the file that emend wrote",
                 "restore the folder from its source and apply the packs again"});
  }
}

}  // namespace

std::vector<std::filesystem::path> active_runtime_packs(const std::filesystem::path& model_folder) {
  std::vector<std::filesystem::path> packs;
  const auto ledger = model_folder / ".emend";
  if (!std::filesystem::exists(ledger / "ledger.json")) return packs;
  const StoredState state = read_state(ledger / "ledger.json");
  for (const auto& id : state.active)
    if (state.known.at(id).runtime) packs.push_back(ledger / "packs" / (id + ".safetensors"));
  return packs;
}

Ledger::Ledger(std::filesystem::path model_folder, const Log& log)
    : folder_(std::move(model_folder)), ledger_(folder_ / ".emend"), log_(log) {
  if (!std::filesystem::is_directory(folder_))
    throw Error(ErrorClass::kNotFound, {folder_.string(), "not a model folder", "a Hugging Face folder",
                                        "a GGUF file has no ledger: write the edited model elsewhere with --out"});
  lock();
  try {
    open();
  } catch (...) {
    ::close(lock_);
    throw;
  }
}

void Ledger::lock() {
  std::error_code error;
  if (std::filesystem::is_symlink(ledger_, error))
    throw Error(ErrorClass::kInvalidArgument,
                {ledger_.string(), "a symbolic link", "the folder's own ledger", "remove the link"});
  std::filesystem::create_directories(ledger_ / "packs", error);
  lock_ = ::open((ledger_ / "lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (lock_ < 0)
    throw Error(ErrorClass::kIo, {ledger_.string(), "cannot write to the model folder", "a writable folder",
                                  "copy the model, or use --out"});
  if (::flock(lock_, LOCK_EX | LOCK_NB) == 0) return;
  ::close(lock_);
  throw Error(ErrorClass::kInvalidArgument,
              {folder_.string(), "another process is changing this model", "", "wait for it to end"});
}

void Ledger::open() {
  remove_abandoned(folder_, std::chrono::seconds(0));  // of a change that was interrupted
  const auto state_path = ledger_ / "ledger.json";
  if (!std::filesystem::exists(state_path)) {
    base_ = models::model_fingerprint(*models::open_checkpoint(folder_.string()));
    return;
  }
  StoredState state = read_state(state_path);
  base_ = state.base;
  active_ = state.active;
  known_ = std::move(state.known);
  if (!state.pending) return;
  log_.warning("ledger.pending", folder_.string() + ": finishing a change that was interrupted");
  change(*state.pending);
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

std::filesystem::path Ledger::pack_path(const std::string& id) const {
  return ledger_ / "packs" / (id + ".safetensors");
}

std::string Ledger::resolve(const std::string& id_or_path) const {
  std::string wanted = id_or_path;
  if (std::filesystem::is_regular_file(id_or_path)) wanted = sha256_hex(read_file(id_or_path)).substr(0, kIdDigits);
  std::vector<std::string> matches;
  for (const auto& [id, entry] : known_)
    if (id.rfind(wanted, 0) == 0) matches.push_back(id);
  if (matches.size() == 1) return matches[0];
  const std::string list = join(known_, ", ", key_of);
  throw Error(ErrorClass::kNotFound,
              {folder_.string(), (matches.empty() ? "no edit \"" : "several edits begin with \"") + id_or_path + "\"",
               list.empty() ? "an edit of this model; it has none" : "one of " + list, "emend list shows them"});
}

std::string Ledger::apply(const std::filesystem::path& pack_file, const ApplyPackOptions& options) {
  const EditPack pack = load_pack(pack_file);
  const std::string id = sha256_hex(read_file(pack_file)).substr(0, kIdDigits);
  if (std::find(active_.begin(), active_.end(), id) != active_.end())
    throw Error(ErrorClass::kInvalidArgument, {folder_.string(), "the edit " + id + " is already in force", "",
                                               "revert it first, or apply another pack"});
  require_base(pack, base_, options, pack_file.string());
  LedgerEntry entry;
  entry.id = id;
  entry.editor = pack.editor;
  entry.facts = static_cast<int64_t>(pack.facts.size());
  for (const auto& fact : pack.facts)
    if (entry.subjects.size() < 3) entry.subjects.push_back(fact.value("subject", ""));
  for (const auto& delta : pack.deltas) entry.weights.push_back(delta.weight);
  entry.runtime = !pack.runtime.empty();
  const auto files = files_of(folder_);
  Rounding rounding;
  for (const auto& delta : pack.deltas) {  // shapes are checked before anything is written
    const SafetensorsFile file(file_of(files, delta.weight, folder_));
    const at::Tensor weight = file.tensor(delta.weight);
    rounding.add(weight, add_delta(weight, delta, folder_), delta);
  }
  entry.survived = rounding.survived();
  keep_originals(entry.weights);
  write_file(pack_path(id), read_file(pack_file));
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
    auto state = read_json(ledger_ / "ledger.json");
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
    old.emplace(open_originals(path));
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
  if (added) write_checked(path, kept, {{"format", "emend originals"}, {"base", base_}});
}

void Ledger::rebuild(const std::vector<std::string>& active, const std::vector<std::string>& weights) {
  if (weights.empty()) return;
  const SafetensorsFile originals = open_originals(ledger_ / "originals.safetensors");
  std::map<std::string, at::Tensor> values;
  for (const auto& weight : weights) values[weight] = originals.tensor(weight);
  for (const auto& id : active)
    for (const auto& delta : load_pack(pack_path(id)).deltas)
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
    packs[id] = {{"editor", entry.editor},    {"facts", entry.facts},           {"subjects", entry.subjects},
                 {"weights", entry.weights},  {"applied_at", entry.applied_at}, {"runtime", entry.runtime},
                 {"survived", entry.survived}};
  const nlohmann::json state = {{"version", kLedgerVersion}, {"base", base_}, {"active", active_}, {"packs", packs}};
  write_file(ledger_ / "ledger.json", state.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

void Ledger::copy_model_folder(const std::filesystem::path& from, const std::filesystem::path& to) {
  std::error_code error;
  if (std::filesystem::exists(to) && !std::filesystem::is_empty(to, error))
    throw Error(ErrorClass::kInvalidArgument,
                {to.string(), "the folder exists and is not empty", "a new or empty folder", "choose another --out"});
  (void)models::open_checkpoint(from.string());  // refuses links that lead out of the folder
  std::filesystem::create_directories(to, error);
  if (error)
    throw Error(ErrorClass::kIo,
                {to.string(), "cannot create the folder (" + error.message() + ")", "", "choose another --out"});
  for (const auto& entry : std::filesystem::directory_iterator(from))
    if (entry.is_regular_file()) link_or_copy(entry.path(), to / entry.path().filename());
}

}  // namespace emend::editors

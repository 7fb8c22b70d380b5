#include <emend/core/atomic_file.h>
#include <emend/core/cache_folder.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/mapped.h>
#include <emend/core/safetensors.h>
#include <emend/core/setting.h>
#include <emend/core/staged.h>
#include <emend/core/text.h>
#include <emend/editors/detail/ledger_state.h>
#include <emend/editors/packs/ledger.h>
#include <emend/editors/packs/neurons_apart.h>
#include <emend/models/checkpoint.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

namespace emend::editors {

using detail::kFolder, detail::kOriginals, detail::kState;
using detail::load_packs, detail::open_originals, detail::read_state, detail::respell, detail::StoredState;

namespace {

const std::filesystem::path& file_of(const std::map<std::string, std::filesystem::path>& files,
                                     const std::string& weight, const std::filesystem::path& folder) {
  const auto it = files.find(weight);
  if (it != files.end()) return it->second;
  const std::string close = closest_name(weight, files, key_of);
  refuse({folder.string(), "no weight \"" + weight + "\", which the pack changes",
          "the model that the pack was made for", close.empty() ? "" : "the closest name here is \"" + close + "\""});
}

// Σ of the deltas added in float64, one rounding to float32 a pack, one to the file's dtype at the end: what
// apply_delta and save_model do to a model in memory.
at::Tensor add_delta(const at::Tensor& weight, const WeightDelta& delta, const std::filesystem::path& folder) {
  const at::Tensor change = delta.stored();
  if (change.sizes() != weight.sizes())
    refuse({folder.string(), "weight \"" + delta.weight + "\" has another shape than the pack's change",
            "the model that the pack was made for", ""});
  const auto compute_dtype = weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return (weight.to(at::kDouble) + change).to(compute_dtype);
}

// `value` as a file holds it.
at::Tensor storable(const at::Tensor& value, at::ScalarType dtype, const std::string& weight,
                    const std::filesystem::path& folder) {
  at::Tensor stored = value.to(dtype);
  if (!at::isfinite(stored).all().item<bool>())
    throw Error(ErrorClass::kNumeric,
                {folder.string(), "weight \"" + weight + "\" would hold NaN or infinite entries",
                 std::string("values that ") + c10::toString(dtype) + " can hold",
                 "nothing was changed; the pack's change is too large, or the weights are damaged"});
  return stored;
}

std::set<std::string> weights_of(const std::vector<std::string>& ids, const std::map<std::string, LedgerEntry>& known) {
  std::set<std::string> weights;
  for (const auto& id : ids) weights.insert(known.at(id).weights.begin(), known.at(id).weights.end());
  return weights;
}

// Share of a change: where less is left after rounding, the figures of the run that made it no longer hold.
constexpr double kTooSmall = 0.9;

// Everything a change of weights needs, before any of it is seen: new weight files and the new state.
class StagedChange {
 public:
  StagedChange(std::filesystem::path folder, std::filesystem::path ledger, std::filesystem::path place)
      : folder_(std::move(folder)), ledger_(std::move(ledger)), staged_(std::move(place)) {
    std::error_code ignored;
    std::filesystem::remove_all(staged_, ignored);  // of a process that had the same number
    std::filesystem::create_directory(staged_);
  }
  ~StagedChange() {
    std::error_code ignored;
    std::filesystem::remove_all(staged_, ignored);
  }
  StagedChange(const StagedChange&) = delete;
  StagedChange& operator=(const StagedChange&) = delete;

  void patch(const std::filesystem::path& file, const std::map<std::string, at::Tensor>& values) {
    patch_safetensors(file, staged_ / file.filename(), values);
    std::filesystem::permissions(staged_ / file.filename(), std::filesystem::status(file).permissions());
    files_.push_back(file.filename());
  }
  // The fingerprint of the model that the folder will hold.
  [[nodiscard]] std::string fingerprint() const {
    const auto whole = staged_ / "whole";
    std::filesystem::create_directory(whole);
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      const auto name = entry.path().filename();
      if (!entry.is_regular_file() || (name.extension() != ".json" && name.extension() != ".safetensors")) continue;
      const bool changed = std::ranges::find(files_, name) != files_.end();
      const auto from = changed ? staged_ / name : std::filesystem::canonical(entry.path());
      std::error_code error;
      std::filesystem::create_hard_link(from, whole / name, error);
      if (error) clone_file(from, whole / name);
    }
    return models::model_fingerprint(*models::open_checkpoint(whole.string()));
  }
  // Once it is `announced`, the next process to open the ledger finishes what this one does not.
  void commit(const StoredState& pending, const StoredState& after, const std::function<void()>& announced) const {
    write_file(staged_ / kState, after.text());
    write_file(ledger_ / kState, pending.text());
    announced();
    for (const auto& file : files_) move(staged_ / file, folder_ / file);
    move(staged_ / kState, ledger_ / kState);
  }

 private:
  void move(const std::filesystem::path& from, const std::filesystem::path& to) const {
    std::error_code error;
    std::filesystem::rename(from, to, error);
    if (error)
      throw Error(class_of_errno(error.value()),
                  {to.string(), "cannot be replaced (" + error.message() + ")", "a folder that stays where it is",
                   "the change is finished when the folder is opened again"});
  }

  std::filesystem::path folder_, ledger_, staged_;
  std::vector<std::filesystem::path> files_;
};

}  // namespace

Ledger::Ledger(std::filesystem::path model_folder, const Log& log)
    : folder_(std::move(model_folder)), ledger_(folder_ / kFolder), log_(log) {
  if (!std::filesystem::is_directory(folder_))
    throw Error(ErrorClass::kNotFound,
                {folder_.string(), "not a model folder", "a Hugging Face folder",
                 "a GGUF file has no ledger: write the edited model elsewhere (" + setting("out") + ")"});
  open();
}

// Without a ledger there is nothing to finish, and nothing is written before the first change. A folder that cannot be
// written is read as it is.
void Ledger::open() {
  std::error_code error;
  const bool there = std::filesystem::exists(std::filesystem::symlink_status(ledger_, error));
  if (lock_.fd < 0 && there && ::access(ledger_.c_str(), W_OK) == 0) lock();
  const auto state_path = ledger_ / kState;
  if (!std::filesystem::exists(state_path, error)) {
    detail::require_no_originals(folder_);
    base_ = models::model_fingerprint(*models::open_checkpoint(folder_.string()));
    return;
  }
  StoredState state = read_state(state_path);
  // Where no edit is in force, what stands there is the original, whatever it was before the last one.
  base_ = state.active.empty() && !state.pending ? models::model_fingerprint(*models::open_checkpoint(folder_.string()))
                                                 : state.base;
  active_ = state.active;
  known_ = std::move(state.known);
  if (base_ == state.base) forms_ = std::move(state.forms);
  if (lock_.fd < 0) return;
  remove_unknown();
  if (!state.pending) return;
  log_.warning("ledger.pending", folder_.string() + ": finishing a change that was interrupted");
  change(*state.pending, known_);  // some of the weights may be the new ones already
}

void Ledger::lock() {
  std::error_code error;
  if (std::filesystem::is_symlink(ledger_, error))
    refuse({ledger_.string(), "a symbolic link", "the folder's own ledger", "remove the link"});
  std::filesystem::create_directories(ledger_ / "packs", error);
  if (!error) lock_.fd = ::open((ledger_ / "lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (lock_.fd < 0)
    throw Error(class_of_errno(error ? error.value() : errno),
                {folder_.string(),
                 "cannot write to the model folder (" + (error ? error.message() : std::strerror(errno)) + ")",
                 "a writable folder", "copy the model, or write the edited one elsewhere (" + setting("out") + ")"});
  struct stat held {
  }, named{};
  const bool mine = lock_alone(lock_.fd, ledger_ / "lock") && ::fstat(lock_.fd, &held) == 0 &&
                    ::stat((ledger_ / "lock").c_str(), &named) == 0 && held.st_ino == named.st_ino;
  if (!mine) {
    ::close(std::exchange(lock_.fd, -1));  // what the other one has made stays
    refuse({folder_.string(), "another process is changing this model", "", "wait for it to end"});
  }
  remove_abandoned(folder_, std::chrono::seconds(0));  // of a change that was interrupted
}

// Before the first write: the lock, and what others wrote while there was none.
void Ledger::begin_change() {
  if (const auto name = models::hub_name(folder_); !name.empty())
    refuse({name, "a model in the Hugging Face cache, which other programs share", "a folder of its own",
            "write the edited model elsewhere (" + setting("out", "DIR") + ")"});
  if (lock_.fd >= 0) return;
  lock();
  open();
}

// What changes left that did not come to pass.
void Ledger::remove_unknown() const {
  std::error_code error;
  if (known_.empty()) std::filesystem::remove(ledger_ / kOriginals, error);
  for (std::filesystem::directory_iterator it(ledger_ / "packs", error), end; !error && it != end; it.increment(error))
    if (!known_.contains(it->path().stem().string())) std::filesystem::remove(it->path(), error);
}

Ledger::~Ledger() {
  std::error_code ignored;
  if (lock_.fd < 0 || !known_.empty()) return;
  for (const char* name : {"packs", "lock"}) std::filesystem::remove(ledger_ / name, ignored);
  std::filesystem::remove(ledger_, ignored);  // never used: leave no trace, unless others keep something there
}

std::vector<LedgerEntry> Ledger::entries() const {
  std::vector<LedgerEntry> list;
  for (const auto& id : active_) {
    list.push_back(known_.at(id));
    list.back().active = true;
  }
  for (const auto& [id, entry] : known_)
    if (std::ranges::count(active_, id) == 0) list.push_back(entry);
  return list;
}

std::string Ledger::resolve(const std::string& id_or_path) const {
  if (id_or_path.empty()) refuse({"edit", "an empty name", "an id or a file", ""});
  std::string wanted = id_or_path;
  if (std::filesystem::is_regular_file(id_or_path)) wanted = pack_id(id_or_path);
  std::vector<std::string> matches;
  for (const auto& [id, entry] : known_)
    if (id.starts_with(wanted)) matches.push_back(id);
  if (matches.size() == 1) return matches[0];
  const std::string list = join(known_, ", ", key_of);
  throw Error(ErrorClass::kNotFound,
              {folder_.string(), (matches.empty() ? "no edit \"" : "several edits begin with \"") + id_or_path + "\"",
               list.empty() ? "an edit of this model; it has none" : "one of " + list, "emend list shows them"});
}

LedgerEntry Ledger::examine(const EditPack& pack) const {
  LedgerEntry entry{.id = pack.id,
                    .editor = pack.editor,
                    .facts = std::ssize(pack.facts),
                    .subjects = {},
                    .weights = mapped(pack.deltas, &WeightDelta::weight),
                    .applied_at = utc_text(std::time(nullptr)),
                    .runtime = !pack.runtime.empty(),
                    .under = pack.under.edits};
  for (const auto& fact : pack.facts)
    if (entry.subjects.size() < 3) entry.subjects.push_back(fact.value("subject", ""));
  const auto files = models::weight_files(folder_);
  double projection = 0, square = 0;  // ⟨written, ΔW⟩ and ‖ΔW‖², summed over weights
  for (const auto& delta : pack.deltas) {
    const SafetensorsFile file(file_of(files, delta.weight, folder_));
    const at::Tensor before = file.tensor(delta.weight);
    const at::Tensor after = storable(add_delta(before, delta, folder_), before.scalar_type(), delta.weight, folder_);
    const at::Tensor change = delta.stored();
    projection += ((after.to(at::kDouble) - before.to(at::kDouble)) * change).sum().item<double>();
    square += change.square().sum().item<double>();
  }
  if (square > 0) entry.survived = projection / square;
  return entry;
}

std::vector<std::string> Ledger::apply(const std::vector<std::filesystem::path>& packs,
                                       const ApplyPackOptions& options) {
  begin_change();
  require_as_left();
  const detail::FolderWeights there(folder_);
  auto all = load_packs(ledger_, {base_, active_});
  for (auto& kept : all) respell(kept.pack, there);
  const size_t before = all.size();
  Lineage here{base_, active_, forms_};
  std::vector<LedgerEntry> entries;
  std::set<std::string> weights;
  for (const auto& path : packs) {  // everything is checked before anything is written
    all.push_back({path.string(), load_pack(path)});
    EditPack& pack = all.back().pack;
    if (std::ranges::count(std::span(here.edits).subspan(before), pack.id) > 0)
      refuse({path.string(), "the edit " + pack.id + ", named twice", "each pack once", ""});
    respell(pack, there);
    require_base(pack, base_, options, path.string(), here);
    if (pack.root() != base_ && !options.force && std::ranges::count(here.forms, pack.root()) == 0)
      here.forms.push_back(pack.root());
    pack.rebase(base_);
    here.edits.push_back(pack.id);
  }
  const auto edited = weights_of(active_, known_);
  move_apart(all, [&, kept = originals_in(ledger_ / kOriginals)](const std::string& weight) -> at::Tensor {
    if (edited.contains(weight)) return kept(weight);
    const auto file = there.files.find(weight);
    return file == there.files.end() ? at::Tensor() : SafetensorsFile(file->second).tensor(weight);
  });
  for (const auto& [name, pack] : std::span(all).subspan(before)) {
    entries.push_back(examine(pack));
    for (const auto& delta : pack.deltas) weights.insert(delta.weight);
  }
  require_together(all, before, options.allow_conflicts, folder_.string(),
                   setting("allow_conflicts") + " adds them all the same");

  auto known = known_;
  try {
    keep_originals(weights);
    for (size_t i = 0; i < packs.size(); ++i) {
      clone_file(packs[i], ledger_ / "packs" / (entries[i].id + ".safetensors"));
      known[entries[i].id] = entries[i];
    }
    forms_ = here.forms;
    change(here.edits, known);
  } catch (...) {
    remove_unknown();
    throw;
  }
  for (const auto& entry : entries) {
    if (entry.whole()) continue;
    const bool lost = entry.survived < kTooSmall;
    log_.event(lost ? LogLevel::kWarning : LogLevel::kInfo, "ledger.rounding",
               entry.id + ": " + percent(entry.survived) + " of the change is left after rounding to the files' types" +
                   (lost ? "; put so small a change into a float32 copy (emend convert)" : ""),
               {{"id", entry.id}, {"survived", entry.survived}});
  }
  return {here.edits.begin() + static_cast<std::ptrdiff_t>(before), here.edits.end()};
}

void Ledger::revert(const std::vector<std::string>& ids_or_paths) {
  begin_change();
  auto active = active_;
  for (const auto& name : ids_or_paths) {
    const std::string id = resolve(name);
    if (std::ranges::count(active_, id) == 0)
      refuse({folder_.string(), "the edit " + id + " is not in force", "", "emend list shows what is"});
    std::erase(active, id);
  }
  require_as_left();
  require_apart(active);
  warn_of_missing(active);
  stamp_and_change(active);
}

// Edits that were made on top of one that goes.
void Ledger::warn_of_missing(const std::vector<std::string>& active) const {
  for (const auto& id : active)
    for (const auto& under : known_.at(id).under)
      if (std::ranges::count(active, under) == 0)
        log_.warning("ledger.under", "the edit " + id + " was made on top of " + under + ", which is not in force");
}

void Ledger::stamp_and_change(const std::vector<std::string>& active) {
  auto known = known_;
  for (const auto& id : active_)
    if (std::ranges::count(active, id) == 0) known[id].applied_at = utc_text(std::time(nullptr));
  change(active, known);
}

void Ledger::revert_all() {
  begin_change();
  if (known_.empty()) return;
  stamp_and_change({});
}

// Another program's work is not written over. Processors round sums differently in the last bit.
void Ledger::require_as_left() const {
  constexpr double kRounding = 1e-5;
  for (const auto& [path, values] : rebuilt(active_, weights_of(active_, known_))) {
    const SafetensorsFile file(path);
    for (const auto& [weight, expected] : values) {
      const at::Tensor there = file.tensor(weight), left = expected.to(at::kDouble);
      if (there.sizes() == left.sizes() &&
          (there.to(at::kDouble) - left).norm().item<double>() <= kRounding * left.norm().item<double>())
        continue;
      throw Error(ErrorClass::kCorruption,
                  {path.string(), "another program has changed \"" + weight + "\"", "the weight that the ledger wrote",
                   "reverting all edits puts the original weights back"});
    }
  }
}

void Ledger::reorder(const std::vector<std::string>& ids) {
  begin_change();
  std::vector<std::string> order;
  for (const auto& id : ids) order.push_back(resolve(id));
  if (!std::ranges::is_permutation(order, active_))
    refuse({folder_.string(), "the new order names other edits than those in force", "each edit in force once",
            "emend list shows them"});
  require_as_left();
  require_apart(order);
  change(order, known_);
}

// A pack that names no other neurons, or too few, keeps its own, whatever stands before it then.
void Ledger::require_apart(const std::vector<std::string>& order) const {
  const auto overlaps = [this](const std::vector<std::string>& ids) {
    std::map<std::set<std::string>, std::string> found;
    const auto packs = load_packs(ledger_, {base_, ids});
    for (const auto& one : packs)
      for (const auto& other : packs)
        if (one.pack.id < other.pack.id)
          for (const auto& what : neurons_of_both(one.pack, other.pack))
            found.emplace(std::set{one.pack.id, other.pack.id}, what);
    return found;
  };
  const auto after = overlaps(order);
  if (after.empty()) return;
  const auto before = overlaps(active_);
  for (const auto& [pair, what] : after)
    if (!before.contains(pair))
      refuse({folder_.string(), "the edits " + join(pair, " and ") + ", which would get in each other's way: " + what,
              "edits whose neurons stay apart", "keep their order, or revert one of these as well"});
}

void Ledger::change(const std::vector<std::string>& active, const std::map<std::string, LedgerEntry>& known) {
  auto weights = weights_of(active_, known_);
  weights.merge(weights_of(active, known));
  const auto place = ledger_ / ("change.tmp-" + std::to_string(::getpid()) + "-0");
  try {
    StagedChange staged(folder_, ledger_, place);
    for (const auto& [path, values] : rebuilt(active, weights)) staged.patch(path, values);
    // What another program did elsewhere in the folder is not the ledger's to undo.
    const auto now = active.empty() ? staged.fingerprint() : base_;
    if (now != base_)
      log_.warning("ledger.base", folder_.string() + ": without any edit this is the model " + now.substr(0, 12) +
                                      ", not " + base_.substr(0, 12) +
                                      " as before the first one: another program has changed its configuration or "
                                      "weights that no edit touched");
    if (now != base_) forms_.clear();
    staged.commit({base_, active_, known, active, forms_}, {now, active, known, {}, forms_}, [&] { known_ = known; });
    base_ = now;
  } catch (const Error& error) {
    throw renamed(error, place, folder_);
  } catch (const std::filesystem::filesystem_error& error) {
    throw Error(class_of_errno(error.code().value()),
                {folder_.string(), "cannot be changed (" + error.code().message() + ")", "a writable folder with space",
                 "nothing was changed"});
  }
  active_ = active;
}

// Of a weight that no edit in force touches the folder holds the original, whatever an earlier edit found there.
void Ledger::keep_originals(const std::set<std::string>& weights) {
  const auto path = ledger_ / kOriginals;
  std::map<std::string, at::Tensor> kept;
  std::optional<SafetensorsFile> old;
  if (std::filesystem::exists(path)) {
    old.emplace(open_originals(path));
    for (const auto& [name, info] : old->tensors()) kept[name] = old->tensor(name);
  }
  const auto files = models::weight_files(folder_);
  const auto touched = weights_of(active_, known_);
  bool changed = false;
  for (const auto& weight : weights) {
    if (touched.contains(weight)) continue;
    const at::Tensor now = SafetensorsFile(file_of(files, weight, folder_)).tensor(weight);
    at::Tensor& original = kept[weight];
    if (original.defined() && original.scalar_type() == now.scalar_type() && at::equal(original, now)) continue;
    if (original.defined())
      log_.warning("ledger.original", folder_.string() + ": another program has changed \"" + weight +
                                          "\" since the last edit of it was taken back; what stands there now is "
                                          "kept as its original");
    original = now;
    changed = true;
  }
  if (!changed) return;
  write_checked(path, {kept.begin(), kept.end()}, {{"format", "emend originals"}, {"base", base_}});
  std::filesystem::permissions(path, std::filesystem::status(files.begin()->second).permissions());
}

std::map<std::filesystem::path, std::map<std::string, at::Tensor>> Ledger::rebuilt(
    const std::vector<std::string>& active, const std::set<std::string>& weights) const {
  std::map<std::filesystem::path, std::map<std::string, at::Tensor>> by_file;
  if (weights.empty()) return by_file;
  const SafetensorsFile originals = open_originals(ledger_ / kOriginals);
  std::map<std::string, at::Tensor> values;
  for (const auto& weight : weights) values[weight] = originals.tensor(weight);
  const detail::FolderWeights there(folder_);
  for (auto& [name, pack] : load_packs(ledger_, {base_, active})) {
    respell(pack, there);
    for (const auto& delta : pack.deltas) {
      const auto value = values.find(delta.weight);
      if (value == values.end())
        throw Error(ErrorClass::kCorruption,
                    {(ledger_ / kState).string(), "no weight \"" + delta.weight + "\" of " + pack.id,
                     "every weight that its pack changes", "put the ledger's file back"});
      value->second = add_delta(value->second, delta, folder_);
    }
  }
  for (auto& [weight, value] : values)
    by_file[file_of(there.files, weight, folder_)][weight] =
        storable(value, originals.tensor(weight).scalar_type(), weight, folder_);
  return by_file;
}

}  // namespace emend::editors

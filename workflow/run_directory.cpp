#include <emend/core/cache_folder.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/mapped.h>
#include <emend/core/safetensors.h>
#include <emend/core/setting.h>
#include <emend/core/sha256.h>
#include <emend/core/staged.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <emend/devices/route.h>
#include <emend/workflow/checkpoint.h>
#include <emend/workflow/documents.h>
#include <emend/workflow/run_directory.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <map>
#include <set>
#include <span>
#include <system_error>

namespace emend::workflow {

std::string dump_json(const nlohmann::ordered_json& document, int indent) {
  return printable(document.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

void require_new(const std::string& path, bool force) {
  if (std::filesystem::exists(path) && !force)
    refuse({path, "it exists already", "a new path", "choose another, or replace it with " + setting("force")});
  require_replaceable(path);
  auto folder = std::filesystem::absolute(path).parent_path();
  while (!std::filesystem::exists(folder)) folder = folder.parent_path();
  errno = ENOTDIR;
  if (!std::filesystem::is_directory(folder) || ::access(folder.c_str(), W_OK) != 0)
    throw Error(ErrorClass::kIo, {path, folder.string() + ": " + std::generic_category().message(errno),
                                  "a place to write to", "choose another, or change its permissions"});
  remove_abandoned_of(path);
}

std::shared_ptr<LogSink> make_sink(std::function<void(const LogEvent&)> take) {
  struct Sink final : LogSink {
    explicit Sink(std::function<void(const LogEvent&)> onward) : take(std::move(onward)) {}
    void write(const LogEvent& event) override { take(event); }
    std::function<void(const LogEvent&)> take;
  };
  return std::make_shared<Sink>(std::move(take));
}

Log log_also_to(const Log& log, const std::filesystem::path& path) {
  const auto onward = [log](const LogEvent& event) { log.event(event.level, event.name, event.text, event.fields); };
  return Log({make_sink(onward), make_json_lines_sink(path.string())});
}

// Nothing but the log and the settings of a run that finished no batch.
static bool lonely(const std::filesystem::path& folder) {
  std::error_code error;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder, error)) {
    const auto name = entry.path().filename();
    if (name != "run.jsonl" && name != "checkpoint" && name != "settings.json" && name != "command.json") return false;
  }
  return !error;
}

// A run that was killed may have written its results, but not yet removed its checkpoint.
void RunDirectory::check(const std::filesystem::path& folder, Earlier expected) {
  const auto holds = [&](const char* name) { return std::filesystem::exists(folder / name); };
  const std::string elsewhere = "choose another folder with " + setting("out");
  const bool checkpoint = holds("checkpoint/settings.json");
  if (expected == Earlier::kAny) return;
  if (holds("results.json") && (!checkpoint || expected == Earlier::kNone))
    refuse({folder.string(), "the folder holds the results of an earlier run",
            expected == Earlier::kNone ? "a folder of its own" : "a run that was interrupted", elsewhere});
  if (expected == Earlier::kNone && checkpoint && holds("checkpoint/batch-000000.safetensors"))
    refuse({folder.string(), "the folder holds a run that was interrupted", "a folder of its own",
            "go on with that run (" + setting("resume") + "), or " + elsewhere});
}

RunDirectory::RunDirectory(std::filesystem::path folder, Earlier expected) : folder_(std::move(folder)) {
  std::error_code error;
  made_ = std::filesystem::create_directories(folder_, error);
  if (error)
    throw Error(class_of_errno(error.value()),
                {folder_.string(), "cannot create the run folder (" + error.message() + ")", "",
                 "choose another folder with " + setting("out")});
  const auto lock_path = folder_ / ".lock";
  lock_ = Descriptor(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (lock_.fd < 0)
    throw Error(class_of_errno(errno),
                {folder_.string(), std::string("cannot write to the run folder (") + std::strerror(errno) + ")", "",
                 "choose another folder with " + setting("out")});
  if (!lock_alone(lock_.fd, lock_path))
    refuse({folder_.string(), "another run is writing to this folder", "",
            "wait for it, or choose another folder with " + setting("out")});
  try {
    check(folder_, expected);
  } catch (...) {
    ::unlink(lock_path.c_str());
    throw;
  }
  remove_abandoned(folder_, std::chrono::seconds(0));  // of a run that was killed
}

void RunDirectory::require_free(const std::vector<std::string>& names) const {
  for (const auto& name : names)
    if (std::filesystem::exists(std::filesystem::symlink_status(folder_ / name)))
      refuse({folder_.string(), "the folder holds " + name + ", which this run did not write", "a folder of its own",
              "choose another folder with " + setting("out")});
}

RunDirectory::~RunDirectory() {
  ::unlink((folder_ / ".lock").c_str());
  if (!made_ || !lonely(folder_)) return;
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

void RunDirectory::write_json(const std::string& name, const nlohmann::ordered_json& document) const {
  write_file(folder_ / name, dump_json(document) + "\n");
}

void RunDirectory::write_lines(const std::string& name, const std::vector<nlohmann::json>& objects) const {
  AtomicFile file(folder_ / name);
  for (const auto& object : objects) file.write(dump_json(object, -1) + "\n");
  file.commit();
}

std::filesystem::path RunDirectory::default_name(const std::string& editor, const std::string& model) {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  localtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y%m%d-%H%M%S", &parts);
  const std::string name = std::string(text) + "-" + editor + "-" + model;
  std::filesystem::path folder = std::filesystem::path("runs") / name;
  for (int more = 2; std::filesystem::exists(folder); ++more)  // begun in the same second
    folder.replace_filename(name + "-" + std::to_string(more));
  return folder;
}

namespace {

using editors::WeightDelta;

// In a batch's document: the run; the batch's place in it; the file of every tensor of the editor's memory after the
// batch; what the guard read, and how many readings there were before.
constexpr const char *kRun = "run", *kIndex = "index", *kMemory = "memory", *kReadings = "readings",
                     *kReadBefore = "readings_before";

constexpr std::pair<const char*, at::Tensor WeightDelta::*> kParts[] = {
    {".left", &WeightDelta::left_DR}, {".right", &WeightDelta::right_FR}, {".dense", &WeightDelta::dense_DF}};

// The parts of a delta with factors, or of one without.
bool has_part(bool low_rank, at::Tensor WeightDelta::*part) {
  return low_rank == (part != &WeightDelta::dense_DF);
}

std::string numbered(const char* stem, size_t index) {
  return formatted("%s%06zu.safetensors", stem, index);
}

void save_document(const std::filesystem::path& path, std::vector<std::pair<std::string, at::Tensor>> tensors,
                   const nlohmann::json& document) {
  for (auto& [name, tensor] : tensors) tensor = devices::to_host(tensor.detach()).contiguous();
  write_checked(path, tensors, {{"document", dump_json(document, -1)}});
}

std::map<std::string, at::Tensor> load_tensors(const SafetensorsFile& file) {
  require_intact(file);
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, info] : file.tensors()) tensors.emplace(name, file.tensor(name).clone());
  return tensors;
}

// Tensors are stored under "<index>.left", "<index>.right" or "<index>.dense".
Batch read_batch(const std::filesystem::path& path, const std::string& run, size_t index) {
  const SafetensorsFile file(path);
  const auto tensors = load_tensors(file);
  const auto document = nlohmann::json::parse(file.metadata().at("document"));
  if (document.value(kRun, "") != run)
    throw Error(ErrorClass::kCorruption, {path.string(), "a batch of another run", "one with this run's settings", ""});
  if (document.value(kIndex, index) != index)
    throw Error(ErrorClass::kCorruption,
                {path.string(), "batch " + document[kIndex].dump(), "batch " + std::to_string(index), ""});
  Batch batch = read_batch_document(document);
  for (size_t i = 0; i < batch.deltas.size(); ++i)
    for (const auto& [name, part] : kParts)
      if (has_part(document["deltas"][i].at("low_rank"), part))
        batch.deltas[i].*part = tensors.at(std::to_string(i) + name);
  return batch;
}

}  // namespace

// Names the first setting that is not as the run began with it, within others too.
static void require_as_begun(const nlohmann::json& now, const nlohmann::json& then, const std::string& where) {
  for (const auto& [key, value] : now.items()) {
    const auto before = then.value(key, nlohmann::json());
    if (before == value || !then.contains(key)) continue;  // absent: of another version
    if (before.is_object() && value.is_object()) {
      require_as_begun(value, before, where);
      continue;
    }
    refuse({where, "\"" + key + "\" is " + value.dump().substr(0, 80) + " now",
            before.dump().substr(0, 80) + ", as when the run began",
            "give the same options, or start anew in another folder"});
  }
}

RunCheckpoint::RunCheckpoint(std::filesystem::path folder, nlohmann::json settings, bool resume, bool reader)
    : folder_(std::move(folder)), reader_(reader) {
  const auto path = folder_ / "settings.json";
  if (resume && std::filesystem::exists(path)) {
    std::optional<JsonFault> unreadable;
    const std::string text = read_file(path);
    const auto old = parse_json(text, {}, unreadable);
    if (!old.is_object())
      throw Error(ErrorClass::kCorruption, {path.string(), "no readable settings", "the file that the run wrote",
                                            "start anew in another folder"});
    for (const auto& [key, changed] : {std::pair("facts_fingerprint", "the facts are others now"),
                                       {"model_fingerprint", "the model is another one now"},
                                       {"editor", "the editor is another one now"}})
      if (settings.contains(key) && old.value(key, nlohmann::json()) != settings.at(key))
        refuse({path.string(), changed, "what the run began with",
                "give the same model, facts and editor again, or start anew in another folder"});
    require_as_begun(settings, old, path.string());
    run_ = sha256_hex(text);
    return;
  }
  fresh_ = true;
  if (reader_) return;
  if (!std::filesystem::exists(path) && std::filesystem::exists(folder_) && !std::filesystem::is_empty(folder_))
    refuse({folder_.string(), "a folder that no run wrote", "a run's checkpoint",
            "choose another folder with " + setting("out")});
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
  std::filesystem::create_directories(folder_, ignored);
  const std::string text = dump_json(settings) + "\n";
  run_ = sha256_hex(text);
  write_file(path, text);
}

void RunCheckpoint::keep_command(const std::vector<std::string>& command) const {
  if (!reader_ && !std::filesystem::exists(folder_ / "command.json"))
    write_file(folder_ / "command.json", dump_json(command) + "\n");
}

std::vector<std::string> RunCheckpoint::command_of(const std::filesystem::path& run) {
  const auto path = run / "checkpoint" / "command.json";
  if (!std::filesystem::exists(path)) return {};
  std::optional<JsonFault> unreadable;
  const auto words = parse_json(read_file(path), {}, unreadable);
  std::vector<std::string> command;
  for (const auto& word : words)
    if (word.is_string()) command.push_back(word);
  if (words.is_array() && words.empty()) return {};  // of a program that embeds this
  if (words.is_array() && command.size() == words.size() && command.size() > 1) return command;
  throw Error(ErrorClass::kCorruption, {path.string(), "no command line", "as the run wrote it",
                                        "remove the file, and give all options that the run began with"});
}

std::filesystem::path RunCheckpoint::batch_path(size_t index) const {
  return folder_ / numbered("batch-", index);
}

std::vector<Batch> RunCheckpoint::load(const Log& log) const {
  std::vector<Batch> batches;
  if (fresh_) return batches;
  while (std::filesystem::exists(batch_path(batches.size()))) {
    const auto path = batch_path(batches.size());
    try {
      batches.push_back(read_batch(path, run_, batches.size()));
    } catch (const std::exception& error) {
      log.warning("checkpoint.damaged", path.string() + " cannot be used and is computed again (" + error.what() + ")");
      break;
    }
  }
  return batches;
}

void RunCheckpoint::save(size_t index, const Batch& batch, const SessionState& state) {
  if (reader_) return;
  const std::string own = numbered("state-", index);
  std::map<std::string, Kept> kept;
  std::vector<std::pair<std::string, at::Tensor>> changed;
  for (const auto& [name, tensor] : state.editor) {
    const auto version = static_cast<int64_t>(tensor._version());
    const auto before = kept_.find(name);
    const bool same =
        before != kept_.end() && before->second.tensor.is_same(tensor) && before->second.version == version;
    kept[name] = {tensor, version, same ? before->second.file : own};
    if (!same) changed.emplace_back(name, tensor);
  }
  if (!changed.empty()) save_document(folder_ / own, std::move(changed), nlohmann::json::object());
  kept_ = std::move(kept);
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (size_t i = 0; i < batch.deltas.size(); ++i)
    for (const auto& [name, part] : kParts)
      if (has_part(batch.deltas[i].low_rank(), part))
        tensors.emplace_back(std::to_string(i) + name, batch.deltas[i].*part);
  auto document = batch_document(batch);
  document[kRun] = run_;
  document[kIndex] = index;
  const auto readings = std::span(state.readings).subspan(std::min(read_, state.readings.size()));
  document[kReadings] = mapped(readings, [](const auto& reading) { return evaluation::to_json(reading); });
  document[kReadBefore] = state.readings.size() - readings.size();
  auto& files = document[kMemory] = nlohmann::json::object();
  std::set<std::string> needed;
  for (const auto& [name, part] : kept_) {
    files[name] = part.file;
    needed.insert(part.file);
  }
  // The batch file comes last: it is what says that the batch is complete.
  save_document(batch_path(index), std::move(tensors), document);
  read_ = state.readings.size();
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder_, ignored))
    if (const auto name = entry.path().filename().string(); name.starts_with("state-") && !needed.contains(name))
      std::filesystem::remove(entry.path(), ignored);
}

SessionState RunCheckpoint::state(size_t batches) const {
  SessionState state;
  if (batches == 0) return state;
  std::filesystem::path path;
  try {
    nlohmann::json document;
    for (size_t i = 0; i < batches; ++i) {
      path = batch_path(i);
      document = nlohmann::json::parse(SafetensorsFile(path).metadata().at("document"));
      state.readings.resize(document.at(kReadBefore));
      for (const auto& reading : document.at(kReadings))
        state.readings.push_back(evaluation::guard_reading_from_json(reading));
    }
    std::map<std::string, std::map<std::string, at::Tensor>> files;
    for (const auto& [name, where] : document.at(kMemory).items()) {
      const auto file = std::filesystem::path(where.get<std::string>()).filename().string();
      path = folder_ / file;
      if (!files.contains(file)) files[file] = load_tensors(SafetensorsFile(path));
      state.editor[name] = files.at(file).at(name);
    }
  } catch (const std::exception&) {
    throw Error(ErrorClass::kCorruption,
                {path.string(), "missing or damaged",
                 "what the editor kept after batch " + std::to_string(batches) + ", as the run wrote it",
                 "put the file back, or start anew in another folder with " + setting("out")});
  }
  return state;
}

void RunCheckpoint::save_measured(const Measured& measured) const {
  if (reader_) return;
  write_file(folder_ / "measured.json", dump_json(measured_document(measured)) + "\n");
}

Measured RunCheckpoint::measured(size_t edits, const Log& log) const {
  const auto path = folder_ / "measured.json";
  if (!std::filesystem::exists(path)) return {};
  try {
    Measured measured = read_measured_document(parse_json(read_file(path), path.string()));
    measured.cut(static_cast<int64_t>(edits));
    return measured;
  } catch (const std::exception& error) {
    log.warning("checkpoint.measured", std::string("what was measured so far is lost: ") + error.what());
    return {};
  }
}

void RunCheckpoint::remove() const {
  if (reader_) return;
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

}  // namespace emend::workflow

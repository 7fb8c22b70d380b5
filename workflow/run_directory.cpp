#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/core/staged.h>
#include <emend/core/utf8.h>
#include <emend/workflow/run_directory.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>

namespace emend::workflow {

std::string dump_json(const nlohmann::ordered_json& document, int indent) {
  return printable(document.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

Log log_also_to(const Log& log, const std::filesystem::path& path) {
  // Hands events on to the sinks of another log.
  class Onward final : public LogSink {
   public:
    explicit Onward(Log log) : log_(std::move(log)) {}
    void write(const LogEvent& event) override { log_.event(event.level, event.name, event.text, event.fields); }

   private:
    Log log_;
  };
  return Log({std::make_shared<Onward>(log), make_json_lines_sink(path.string())});
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

RunDirectory::RunDirectory(std::filesystem::path folder, bool resume) : folder_(std::move(folder)) {
  std::error_code error;
  made_ = std::filesystem::create_directories(folder_, error);
  if (error)
    throw Error(ErrorClass::kIo, {folder_.string(), "cannot create the run folder (" + error.message() + ")", "",
                                  "choose another folder with " + setting("out")});
  const auto lock_path = folder_ / ".lock";
  lock_ = ::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (lock_ < 0)
    throw Error(ErrorClass::kIo,
                {folder_.string(), std::string("cannot write to the run folder (") + std::strerror(errno) + ")", "",
                 "choose another folder with " + setting("out")});
  if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    ::close(lock_);
    lock_ = -1;
    throw Error(ErrorClass::kInvalidArgument, {folder_.string(), "another run is writing to this folder", "",
                                               "wait for it, or choose another folder with " + setting("out")});
  }
  remove_abandoned(folder_, std::chrono::seconds(0));  // of a run that was killed
  if (!resume && std::filesystem::exists(folder_ / "results.json")) {
    ::close(lock_);
    lock_ = -1;
    throw Error(ErrorClass::kInvalidArgument,
                {folder_.string(), "the folder holds the results of an earlier run", "",
                 "choose another folder with " + setting("out") + ", or give " + setting("resume")});
  }
}

void RunDirectory::require_free(const std::vector<std::string>& names) const {
  for (const auto& name : names)
    if (std::filesystem::exists(std::filesystem::symlink_status(folder_ / name)))
      throw Error(ErrorClass::kInvalidArgument,
                  {folder_.string(), "the folder holds " + name + ", which this run did not write",
                   "a folder of its own", "choose another folder with " + setting("out")});
}

RunDirectory::~RunDirectory() {
  if (lock_ < 0) return;
  ::unlink((folder_ / ".lock").c_str());
  ::close(lock_);
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
  return std::filesystem::path("runs") / (std::string(text) + "-" + editor + "-" + model);
}

}  // namespace emend::workflow

#include <emend/core/atomic_file.h>
#include <emend/core/staged.h>
#include <emend/core/text.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <optional>
#include <vector>

namespace emend {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMark = ".tmp-";

// The process that wrote "<name>.tmp-<pid>-<n>"; 0 if the name is another one.
long writer_of(const std::string& name) {
  const size_t at = name.rfind(kMark);
  if (at == std::string::npos) return 0;
  const size_t pid = at + 5, dash = name.find('-', pid);
  constexpr const char* kDigits = "0123456789";
  if (dash == std::string::npos || dash == pid || dash + 1 == name.size() || dash - pid > 10 ||
      name.find_first_not_of(kDigits, pid) != dash || name.find_first_not_of(kDigits, dash + 1) != std::string::npos)
    return 0;
  return std::stol(name.substr(pid, dash - pid));
}

[[noreturn]] void throw_io(const fs::path& path, const std::string& what, const std::error_code& error) {
  throw Error(class_of_errno(error.value()),
              {path.string(), what + " (" + error.message() + ")", "a place that can be written",
               "check the path, its permissions and the space; nothing was left there"});
}

dev_t device_of(const fs::path& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 ? info.st_dev : 0;
}

// Removes the marked entries of a folder whose names begin with `name` or ".name".
void sweep(const fs::path& folder, const std::string& name) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string entry = it->path().filename().string();
    if ((entry.starts_with(name + kMark) || entry.starts_with("." + name + kMark)) &&
        is_abandoned(*it, std::chrono::seconds(0)))
      found.push_back(it->path());
  }
  for (const auto& path : found) fs::remove_all(path, error);
}

class Staged {
 public:
  explicit Staged(const fs::path& target) : target_(fs::absolute(target).lexically_normal()) {
    if (!target_.has_filename()) target_ = target_.parent_path();  // "out/"
    std::error_code error;
    if (const auto real = fs::canonical(target_, error); !error) target_ = real;  // behind a link
    was_there_ = fs::exists(target_, error);
    require_replaceable(target_);
    make_parents();
    const std::string name = target_.filename().string();
    remove_abandoned_of(target_);
    const bool beside = !fs::is_directory(target_, error) || (device_of(target_) == device_of(target_.parent_path()) &&
                                                              ::access(target_.parent_path().c_str(), W_OK) == 0);
    static std::atomic<int> counter{0};  // process-wide uniqueness of names
    staging_ = (beside ? target_.parent_path() : target_) /
               ("." + name + kMark + std::to_string(::getpid()) + "-" + std::to_string(counter++));
    fs::remove_all(staging_, error);  // of a process that had the same number
  }
  ~Staged() {
    std::error_code ignored;
    fs::remove_all(staging_, ignored);
    if (!committed_)
      for (const auto& folder : made_) fs::remove(folder, ignored);
  }
  Staged(const Staged&) = delete;
  Staged& operator=(const Staged&) = delete;

  [[nodiscard]] const fs::path& path() const { return staging_; }

  void commit(const std::function<bool(const std::string&)>& superseded) {
    std::error_code error;
    fs::rename(staging_, target_, error);
    if (error) {
      if (!fs::is_directory(staging_) || !fs::is_directory(target_)) throw_io(target_, "cannot be replaced", error);
      if (!was_there_)
        refuse({target_.string(), "another program has just made this folder", "a place of its own",
                "look at what it holds, or choose another place"});
      if (!exchange(superseded)) replace_files(superseded);
    }
    committed_ = true;
  }

 private:
  void make_parents() {
    std::error_code error;
    std::vector<fs::path> missing;
    for (fs::path parent = target_.parent_path(); !fs::exists(parent, error); parent = parent.parent_path())
      missing.push_back(parent);
    for (auto parent = missing.rbegin(); parent != missing.rend(); ++parent) {
      if (fs::create_directory(*parent, error)) made_.insert(made_.begin(), *parent);
      if (!error) continue;
      std::error_code ignored;
      for (const auto& folder : made_) fs::remove(folder, ignored);
      throw_io(target_, "cannot create the folder " + parent->string(), error);
    }
  }

  // Entries of the older folder that neither the new one nor the caller replaces.
  [[nodiscard]] std::vector<fs::path> kept(const std::function<bool(const std::string&)>& superseded) const {
    std::vector<fs::path> entries;
    for (const auto& entry : fs::directory_iterator(target_)) {
      const std::string name = entry.path().filename().string();
      if (!fs::exists(staging_ / name) && entry.path() != staging_ && !(superseded && superseded(name)))
        entries.push_back(entry.path());
    }
    return entries;
  }

  // The new folder, with what stays of the older one, for that one, in one step; false, and nothing, if that cannot be.
  bool exchange(const std::function<bool(const std::string&)>& superseded) {
    if (staging_.parent_path() == target_) return false;
    std::vector<fs::path> linked;
    std::error_code error;
    for (const auto& entry : kept(superseded)) {
      constexpr auto kHow =
          fs::copy_options::recursive | fs::copy_options::create_hard_links | fs::copy_options::copy_symlinks;
      linked.push_back(staging_ / entry.filename());
      fs::copy(entry, linked.back(), kHow, error);  // the older name goes with the older folder
      if (error) break;
    }
    if (!error) fs::permissions(staging_, fs::status(target_).permissions(), error);
    if (!error && ::renameat2(AT_FDCWD, staging_.c_str(), AT_FDCWD, target_.c_str(), RENAME_EXCHANGE) == 0) return true;
    for (const auto& path : linked) fs::remove_all(path, error);
    return false;
  }

  // Without config.json a folder is not a model: it goes first and comes last.
  void replace_files(const std::function<bool(const std::string&)>& superseded) const {
    std::error_code error;
    std::vector<fs::path> stale, fresh;
    const auto stay = kept(superseded);
    for (const auto& entry : fs::directory_iterator(target_))
      if (entry.path() != staging_ && std::ranges::find(stay, entry.path()) == stay.end())
        stale.push_back(entry.path());
    for (const auto& entry : fs::directory_iterator(staging_)) fresh.push_back(entry.path());
    const auto is_model = [](const fs::path& path) { return path.filename() == "config.json"; };
    std::ranges::stable_partition(stale, is_model);
    std::ranges::stable_partition(fresh, std::not_fn(is_model));
    for (const auto& path : stale)
      if (fs::remove_all(path, error); error) throw_io(path, "cannot remove the older file", error);
    for (const auto& path : fresh)
      if (fs::rename(path, target_ / path.filename(), error); error)
        throw_io(target_ / path.filename(), "cannot be written", error);
  }

  fs::path target_, staging_;
  std::vector<fs::path> made_;  // parents, the deepest first
  bool committed_ = false, was_there_ = false;
};

}  // namespace

TemporaryFolder::TemporaryFolder(const std::string& name, const std::string& advice) {
  std::string pattern = (fs::temp_directory_path() / ("emend-" + name + "-XXXXXX")).string();
  if (!::mkdtemp(pattern.data()))
    throw Error(class_of_errno(errno), {pattern, "a temporary folder cannot be made", "", advice});
  path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void require_place(const fs::path& path) {
  std::error_code error;
  const auto status = fs::status(path, error);
  if (!fs::exists(status) && fs::is_symlink(fs::symlink_status(path, error)))
    refuse({path.string(), "a symbolic link to a place that is not there", "a new place",
            "remove the link, or choose another place"});
  if (fs::exists(status) && !fs::is_directory(status) && !fs::is_regular_file(status))
    refuse({path.string(), "a device or a pipe", "a file or a folder", "choose another place"});
}

void require_replaceable(const fs::path& path) {
  require_place(path);
  std::error_code error;
  const auto target = fs::canonical(path, error);
  if (error || !fs::is_directory(target, error)) return;
  const auto here = fs::current_path(error);
  const auto [rest, _] = std::mismatch(target.begin(), target.end(), here.begin(), here.end());
  if (!error && rest == target.end())
    refuse({path.string(), "the folder that this program runs in", "a folder that can be replaced as a whole",
            "name a new one"});
}

void write_whole(const fs::path& target, const std::function<void(const fs::path&)>& write,
                 const std::function<bool(const std::string&)>& superseded) {
  std::optional<Staged> staged;
  try {
    staged.emplace(target);
    write(staged->path());
    staged->commit(superseded);
  } catch (const Error& error) {
    throw staged ? renamed(error, staged->path(), target) : error;
  } catch (const fs::filesystem_error& error) {
    throw_io(target, "cannot be written", error.code());
  }
}

Error renamed(const Error& error, const fs::path& from, const fs::path& to) {
  ErrorParts parts = parts_of(error);
  for (std::string* part : {&parts.where, &parts.got, &parts.expected, &parts.advice})
    *part = replace_all(std::move(*part), from.string(), to.string());
  return {error.error_class(), parts};
}

void clone_file(const fs::path& from, const fs::path& to) {
  std::error_code error;
  if (fs::equivalent(from, to, error)) return;
  const MappedFile source(from);
  const Descriptor blocks(::open(from.c_str(), O_RDONLY | O_CLOEXEC));
  AtomicFile copy(to);
  if (::ioctl(copy.fd(), FICLONE, blocks.fd) != 0) copy.write(source.data(), source.size());
  copy.commit();
}

void remove_abandoned_of(const fs::path& target) {
  const fs::path folder = target.has_parent_path() ? target.parent_path() : ".";
  std::error_code error;
  sweep(folder, target.filename().string());
  if (fs::is_directory(target, error)) sweep(target, target.filename().string());
}

bool is_abandoned(const fs::directory_entry& entry, std::chrono::seconds age) {
  const long pid = writer_of(entry.path().filename().string());
  if (pid <= 0 || ::kill(static_cast<pid_t>(pid), 0) == 0 || errno != ESRCH) return false;
  std::error_code error;
  const auto written = entry.last_write_time(error);
  return !error && fs::file_time_type::clock::now() - written >= age;
}

size_t remove_abandoned(const fs::path& folder, std::chrono::seconds age) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::recursive_directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code gone;  // another process may remove files meanwhile
    if (it->is_symlink(gone) || !is_abandoned(*it, age)) continue;
    found.push_back(it->path());
    it.disable_recursion_pending();
  }
  for (const auto& path : found) fs::remove_all(path, error);
  return found.size();
}

}  // namespace emend

#include <emend/core/error.h>
#include <emend/core/log.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <mutex>

namespace emend {
namespace {

std::string_view level_name(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug: return "debug";
    case LogLevel::kInfo: return "info";
    case LogLevel::kWarning: return "warning";
    case LogLevel::kError: return "error";
  }
  return "info";
}

std::string clock_text(const char* format, bool utc) {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  utc ? gmtime_r(&now, &parts) : localtime_r(&now, &parts);
  char text[40];
  std::strftime(text, sizeof text, format, &parts);
  return text;
}

void write_all(int fd, const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = ::write(fd, text.data() + done, text.size() - done);
    if (n <= 0) return;  // nowhere left to complain to
    done += static_cast<size_t>(n);
  }
}

class TerminalSink final : public LogSink {
 public:
  TerminalSink(int fd, LogLevel lowest, bool colour) : fd_(fd), lowest_(lowest), colour_(colour) {}

  void write(const LogEvent& event) override {
    if (event.level < lowest_) return;
    std::string mark;
    if (event.level == LogLevel::kWarning) mark = colour_ ? "\x1b[33mwarning:\x1b[0m " : "warning: ";
    if (event.level == LogLevel::kError) mark = colour_ ? "\x1b[31merror:\x1b[0m " : "error: ";
    // On a terminal a progress bar may stand on this line: clear it first.
    const std::string clear = ::isatty(fd_) ? "\r\x1b[K" : "";
    std::lock_guard lock(mutex_);
    write_all(fd_, clear + clock_text("%H:%M:%S ", false) + mark + event.text + "\n");
  }

 private:
  int fd_;
  LogLevel lowest_;
  bool colour_;
  std::mutex mutex_;
};

class JsonLinesSink final : public LogSink {
 public:
  explicit JsonLinesSink(const std::string& path) : out_(path, std::ios::app) {
    if (!out_)
      throw Error(ErrorClass::kIo, {path, std::string("cannot open for appending (") + std::strerror(errno) + ")",
                                    "a writable path", "choose another --log-file"});
  }

  void write(const LogEvent& event) override {
    nlohmann::json line = {{"ts", clock_text("%Y-%m-%dT%H:%M:%SZ", true)},
                           {"level", level_name(event.level)},
                           {"event", event.name},
                           {"text", event.text}};
    if (event.fields.is_object()) line["fields"] = event.fields;
    std::lock_guard lock(mutex_);
    out_ << line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << '\n' << std::flush;
  }

 private:
  std::ofstream out_;
  std::mutex mutex_;
};

struct ProgressState {
  int fd;
  double seconds;
  bool terminal;
  std::chrono::steady_clock::time_point last{};
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
  std::string phase;
  bool open_line = false;
};

std::string remaining_text(const ProgressState& state, const ProgressUpdate& update) {
  if (update.total <= 0 || update.done <= 0 || update.done >= update.total) return "";
  const double spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - state.begin).count();
  const auto left = static_cast<long>(std::ceil(spent / update.done * (update.total - update.done)));
  if (left < 60) return ", " + std::to_string(left) + " s left";
  return ", " + std::to_string((left + 59) / 60) + " min left";
}

}  // namespace

Log::Log() : sinks_(std::make_shared<std::vector<std::shared_ptr<LogSink>>>()) {}
Log::Log(std::vector<std::shared_ptr<LogSink>> sinks)
    : sinks_(std::make_shared<std::vector<std::shared_ptr<LogSink>>>(std::move(sinks))) {}

void Log::event(LogLevel level, std::string_view name, const std::string& text, const nlohmann::json& fields) const {
  const LogEvent event{level, std::string(name), text, fields};
  for (const auto& sink : *sinks_) sink->write(event);
}
void Log::debug(std::string_view name, const std::string& text) const { event(LogLevel::kDebug, name, text, nullptr); }
void Log::info(std::string_view name, const std::string& text) const { event(LogLevel::kInfo, name, text, nullptr); }
void Log::warning(std::string_view name, const std::string& text) const {
  event(LogLevel::kWarning, name, text, nullptr);
}
void Log::error(std::string_view name, const std::string& text) const { event(LogLevel::kError, name, text, nullptr); }

std::shared_ptr<LogSink> make_terminal_sink(int fd, LogLevel lowest, bool colour) {
  return std::make_shared<TerminalSink>(fd, lowest, colour);
}

std::shared_ptr<LogSink> make_json_lines_sink(const std::string& path) {
  return std::make_shared<JsonLinesSink>(path);
}

bool wants_colour(int fd) {
  const char* none = std::getenv("NO_COLOR");
  if (none && *none) return false;
  const char* force = std::getenv("CLICOLOR_FORCE");
  if (force && *force && std::strcmp(force, "0") != 0) return true;
  const char* term = std::getenv("TERM");
  return ::isatty(fd) && term && std::strcmp(term, "dumb") != 0;
}

ProgressFn make_progress(int fd, double seconds) {
  auto state = std::make_shared<ProgressState>();
  state->fd = fd;
  state->seconds = seconds;
  const char* term = std::getenv("TERM");
  state->terminal = ::isatty(fd) && term && std::strcmp(term, "dumb") != 0;
  return [state](const ProgressUpdate& update) {
    const auto now = std::chrono::steady_clock::now();
    if (update.phase != state->phase) {
      state->phase = update.phase;
      state->begin = now;
      state->last = {};
    }
    const bool finished = update.total > 0 && update.done >= update.total;
    const double since = std::chrono::duration<double>(now - state->last).count();
    if (!finished && since < (state->terminal ? 0.1 : state->seconds)) return;
    state->last = now;
    std::string text = update.phase;
    if (update.total > 0) {
      const double share = std::min(1.0, update.done / update.total);
      if (state->terminal) {
        const int width = 24, filled = static_cast<int>(share * width);
        text += " [" + std::string(filled, '#') + std::string(width - filled, '.') + "]";
      }
      text += " " + std::to_string(static_cast<int>(share * 100)) + "%";
    }
    if (!update.detail.empty()) text += "  " + update.detail;
    text += remaining_text(*state, update);
    if (state->terminal) {
      write_all(state->fd, "\r\x1b[K" + text + (finished ? "\n" : ""));
    } else {
      write_all(state->fd, text + "\n");
    }
  };
}

}  // namespace emend

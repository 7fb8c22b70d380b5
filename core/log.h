// The log and progress handles. The library writes through them and never to standard output.
//
// The sinks (terminal on standard error, JSON lines file) are chosen by the program; the default handle has none and
// drops everything. Events carry fields so that a machine-readable twin of each line exists.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace emend {

enum class LogLevel { kDebug, kInfo, kWarning, kError };  ///< in ascending order of weight

/// One event: a short dotted name ("statistics.layer"), a sentence for people, and fields for machines.
struct LogEvent {
  LogLevel level = LogLevel::kInfo;
  std::string name;
  std::string text;
  nlohmann::json fields = nlohmann::json::object();
};

/// Receives events. Implementations must be thread-safe.
class LogSink {
 public:
  virtual ~LogSink() = default;
  virtual void write(const LogEvent& event) = 0;  ///< called from any thread
};

/// A cheap, copyable handle to a set of sinks.
class Log {
 public:
  /// Drops everything.
  Log();
  explicit Log(std::vector<std::shared_ptr<LogSink>> sinks);

  /// An event without fields, of this level.
  void debug(std::string_view name, const std::string& text) const { event(LogLevel::kDebug, name, text, no_fields()); }
  void info(std::string_view name, const std::string& text) const { event(LogLevel::kInfo, name, text, no_fields()); }
  void warning(std::string_view name, const std::string& text) const {
    event(LogLevel::kWarning, name, text, no_fields());
  }
  void error(std::string_view name, const std::string& text) const { event(LogLevel::kError, name, text, no_fields()); }
  /// With fields for the machine-readable twin (a JSON object).
  void event(LogLevel level, std::string_view name, const std::string& text, const nlohmann::json& fields) const;

 private:
  static nlohmann::json no_fields() { return nlohmann::json::object(); }

  std::shared_ptr<const std::vector<std::shared_ptr<LogSink>>> sinks_;
};

/// Sink on standard error: "12:03:04 text", warnings and errors marked; only events with text. Colours if `colour`.
[[nodiscard]] std::shared_ptr<LogSink> make_terminal_sink(LogLevel lowest, bool colour);
/// Sink that appends one JSON object a line: ts, level, event, text, fields. Throws Error(kIo) if it cannot open.
[[nodiscard]] std::shared_ptr<LogSink> make_json_lines_sink(const std::string& path);

/// How far a long job is. Called from the thread that does the work.
struct ProgressUpdate {
  std::string phase;   ///< "statistics", "targets", …
  double done = 0;     ///< in units of `total`
  double total = 0;    ///< 0 when unknown
  std::string detail;  ///< "12/32 facts, loss 0.41"
};
using ProgressFn = std::function<void(const ProgressUpdate&)>;

/// Progress on a file descriptor: one redrawn bar on a terminal, else one line every `seconds`.
/// Honours NO_COLOR and TERM=dumb. Safe to copy; finishing (done == total) ends the line.
[[nodiscard]] ProgressFn make_progress(int fd, double seconds = 5.0);

/// True if `fd` is a terminal that can move its cursor (not TERM=dumb).
[[nodiscard]] bool is_terminal(int fd);
/// True if `fd` is a terminal on which colours are wanted (NO_COLOR, CLICOLOR_FORCE, TERM=dumb honoured).
[[nodiscard]] bool wants_colour(int fd);

}  // namespace emend

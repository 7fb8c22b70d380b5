// Sinks on spdlog. Compiled without LibTorch's include folders, whose own copy of fmt would shadow spdlog's.
#include <emend/core/log.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <spdlog/logger.h>
#include <spdlog/sinks/ansicolor_sink.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <utility>

namespace emend {
namespace {

struct Level {
  spdlog::level::level_enum level;
  std::string_view name, mark;
};
// In the order of LogLevel.
constexpr Level kLevels[] = {{spdlog::level::debug, "debug", ""},
                             {spdlog::level::info, "info", ""},
                             {spdlog::level::warn, "warning", "warning: "},
                             {spdlog::level::err, "error", "error: "}};

const Level& facts_of(LogLevel level) {
  return kLevels[static_cast<size_t>(level)];
}

class TerminalSink final : public LogSink {
 public:
  TerminalSink(LogLevel lowest, bool colour) : logger_("terminal", make(colour)), lowest_(lowest) {
    logger_.set_level(spdlog::level::trace);
  }

  void write(const LogEvent& event) override {
    if (event.level < lowest_ || event.text.empty()) return;
    // On a terminal a progress bar may stand on this line: clear it first.
    if (clear_) [[maybe_unused]]
      const auto n = ::write(2, "\r\x1b[K", 4);
    logger_.log(facts_of(event.level).level, "{}{}", facts_of(event.level).mark, printable(event.text));
  }

 private:
  static spdlog::sink_ptr make(bool colour) {
    auto sink = std::make_shared<spdlog::sinks::ansicolor_stderr_sink_mt>(colour ? spdlog::color_mode::always
                                                                                 : spdlog::color_mode::never);
    sink->set_color(spdlog::level::info, sink->reset);
    sink->set_pattern("%H:%M:%S %^%v%$");
    return sink;
  }

  spdlog::logger logger_;
  LogLevel lowest_;
  bool clear_ = is_terminal(2);
};

// What is appended to must be a log, so that a wrong name ruins nothing. Every line of ours begins alike.
const std::string& require_log(const std::string& path) {
  constexpr std::string_view kBegin = "{\"event\":";
  char first[kBegin.size()];
  std::error_code none;
  if (!std::filesystem::is_regular_file(path, none) || std::filesystem::file_size(path, none) == 0) return path;
  if (!std::ifstream(path).read(first, sizeof first) || std::string_view(first, sizeof first) != kBegin)
    refuse({path, "a file that is no log", "a new file, or a log of emend", "choose another " + setting("log_file")});
  return path;
}

class JsonLinesSink final : public LogSink {
 public:
  explicit JsonLinesSink(const std::string& path) try
      : logger_("json", std::make_shared<spdlog::sinks::basic_file_sink_mt>(require_log(path), /*truncate=*/false)) {
    logger_.set_pattern("%v");
    logger_.set_level(spdlog::level::trace);
    logger_.flush_on(spdlog::level::trace);
    logger_.set_error_handler([path, told = false](const std::string& why) mutable {
      if (std::exchange(told, true)) return;
      TerminalSink(LogLevel::kWarning, false)
          .write({LogLevel::kWarning, "log.lost", path + ": the log cannot be written (" + why + ")", {}});
    });
  } catch (const spdlog::spdlog_ex& error) {
    throw Error(ErrorClass::kIo, {path, std::string("cannot open the log (") + error.what() + ")", "a writable path",
                                  "choose another " + setting("log_file")});
  }

  void write(const LogEvent& event) override {
    nlohmann::json line = {{"ts", utc_text(std::time(nullptr))},
                           {"level", facts_of(event.level).name},
                           {"event", event.name},
                           {"text", event.text},
                           {"fields", event.fields}};
    logger_.info("{}", printable(line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)));
  }

 private:
  spdlog::logger logger_;
};

}  // namespace

std::shared_ptr<LogSink> make_terminal_sink(LogLevel lowest, bool colour) {
  return std::make_shared<TerminalSink>(lowest, colour);
}

std::shared_ptr<LogSink> make_json_lines_sink(const std::string& path) {
  return std::make_shared<JsonLinesSink>(path);
}

}  // namespace emend

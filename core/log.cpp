#include <emend/core/log.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>

namespace emend {
namespace {

void write_all(int fd, const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = ::write(fd, text.data() + done, text.size() - done);
    if (n <= 0) return;  // nowhere left to complain to
    done += static_cast<size_t>(n);
  }
}

struct ProgressState {
  int fd;
  double seconds;
  bool terminal;
  std::chrono::steady_clock::time_point last{};
  std::chrono::steady_clock::time_point begin{};  // of the first report of this phase, when `first` was done
  double first = 0, done = 0;
  std::string phase;
};

std::string remaining_text(const ProgressState& state, const ProgressUpdate& update) {
  if (update.total <= 0 || update.done <= state.first || update.done >= update.total) return "";
  const double spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - state.begin).count();
  const auto left = static_cast<long>(std::ceil(spent / (update.done - state.first) * (update.total - update.done)));
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

bool is_terminal(int fd) {
  const char* term = std::getenv("TERM");
  return ::isatty(fd) && term && std::strcmp(term, "dumb") != 0;
}

bool wants_colour(int fd) {
  if (!environment("NO_COLOR").empty()) return false;
  const std::string force = environment("CLICOLOR_FORCE");
  return (!force.empty() && force != "0") || is_terminal(fd);
}

ProgressFn make_progress(int fd, double seconds) {
  auto state = std::make_shared<ProgressState>();
  state->fd = fd;
  state->seconds = seconds;
  state->terminal = is_terminal(fd);
  return [state](const ProgressUpdate& update) {
    const auto now = std::chrono::steady_clock::now();
    // The same work, once more; what threads report side by side falls back by little.
    const bool again = state->done > state->first && (update.done <= state->first || 2 * update.done < state->done);
    if (update.phase != state->phase || again) {
      state->phase = update.phase;
      state->begin = now;
      state->first = update.done;
      state->last = {};
    }
    state->done = update.done;
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
    if (!update.detail.empty()) text += "  " + printable(update.detail, false);
    text += remaining_text(*state, update);
    if (state->terminal) {
      write_all(state->fd, "\r\x1b[K" + text + (finished ? "\n" : ""));
    } else {
      write_all(state->fd, text + "\n");
    }
  };
}

}  // namespace emend

#include "cli.h"

#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/devices/placement.h>
#include <emend/devices/runtime.h>
#include <emend/devices/units.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <exception>
#include <filesystem>
#include <memory>
#include <new>
#include <system_error>

namespace emend::tools {
namespace {

// The only global of the programs: a signal handler can reach nothing else. Null where nothing runs that could stop.
std::atomic<CancelToken*> interrupted = nullptr;

extern "C" void on_signal(int signal) {
  CancelToken* const running = interrupted;
  if (running && !running->requested()) {
    running->request();
    const char text[] = "\ninterrupted: stopping after the current step; press Ctrl-C again to stop at once\n";
    [[maybe_unused]] const auto n = ::write(2, text, sizeof text - 1);
    return;
  }
  ::_exit(128 + signal);
}

// While it lives the first signal asks the token to stop; one that comes later ends the process.
struct SignalHandlers {
  explicit SignalHandlers(CancelToken& cancel) {
    interrupted = &cancel;
    struct sigaction action {};
    action.sa_handler = on_signal;
    ::sigaction(SIGINT, &action, nullptr);
    ::sigaction(SIGTERM, &action, nullptr);
    struct sigaction before {};  // nohup lets a program outlive its terminal
    if (::sigaction(SIGHUP, nullptr, &before) == 0 && before.sa_handler != SIG_IGN)
      ::sigaction(SIGHUP, &action, nullptr);
    ::signal(SIGPIPE, SIG_IGN);
    ::signal(SIGXFSZ, SIG_IGN);  // a file at its limit of size is a write that fails, and is told as one
  }
  ~SignalHandlers() { interrupted = nullptr; }
};

// Freed when memory ends: what is left behind by the exception (JSON documents above all, whose destructors allocate)
// can then be cleaned up, and the message be written. Never touched, so it costs address space alone.
std::unique_ptr<char[]>& reserve() {
  static auto bytes = std::make_unique_for_overwrite<char[]>(size_t{32} << 20);
  return bytes;
}

void give_reserve() {
  reserve().reset();
  throw std::bad_alloc();
}

Error no_memory() {
  return {
      ErrorClass::kDevice,
      {"memory", "the machine has no memory left", "", "use a smaller model, or a smaller " + setting("batch_size")}};
}

// Memory can also end where nothing may be thrown: in the destructor of a JSON document that goes while all is well.
// The process ends there, as if killed, but with the message and the status of the exception.
[[noreturn]] void on_terminate() {
  try {
    if (const auto running = std::current_exception()) std::rethrow_exception(running);
  } catch (const std::bad_alloc&) {
    const std::string text = std::string("error: ") + no_memory().what() + "\n";
    [[maybe_unused]] const auto n = ::write(2, text.data(), text.size());
    ::_exit(exit_code(ErrorClass::kDevice));
  } catch (...) {  // told, with its type, by the usual handler
  }
  __gnu_cxx::__verbose_terminate_handler();
  std::abort();
}

void open_handles(Common& common, const std::function<void()>& before_files) {
  std::vector<std::shared_ptr<LogSink>> sinks = {
      make_terminal_sink(common.quiet ? LogLevel::kWarning : LogLevel::kInfo, wants_colour(2))};
  common.log = Log(sinks);  // which says what is wrong with the other one
  if (reserve()) std::set_new_handler(give_reserve);
  std::set_terminate(on_terminate);
  before_files();
  if (!common.log_file.empty()) sinks.push_back(make_json_lines_sink(common.log_file));
  common.log = Log(std::move(sinks));
  if (!common.quiet) common.progress = make_progress(2);
}

// What the accelerators hold, for errors about them.
void report_memory(const Common& common) {
  for (const auto& info : devices::visible_devices()) {
    if (info.device.is_cpu()) continue;
    const auto stats = devices::device_memory_stats(info.device);
    if (stats.peak < 1024) continue;  // a probe's
    common.log.warning("memory", devices::to_string(info.device) + " holds " + devices::format_bytes(stats.allocated) +
                                     " (at most " + devices::format_bytes(stats.peak) + ") of " +
                                     devices::format_bytes(info.total_bytes) +
                                     "; `emend plan` counts what a model needs before it is loaded");
  }
}

// Advice without the ways ("…; …, or …") that need an option of another verb.
std::string own_advice(const std::string& advice) {
  std::string own, between;
  for (size_t begin = 0; begin < advice.size();) {
    const size_t end = std::min({advice.find("; ", begin), advice.find(", or ", begin), advice.size()});
    const std::string way = advice.substr(begin, end - begin);
    if (way.find(kOfOther) == std::string::npos) own += (own.empty() ? "" : between) + way;
    between = advice.substr(end, advice.compare(end, 2, "; ") == 0 ? 2 : 5);
    begin = end + between.size();
  }
  return own;
}

int report(const Common& common, const Error& given) {
  auto parts = parts_of(given);
  const bool elsewhere = parts.advice.find(kOfOther) != std::string::npos;
  if (elsewhere) parts.advice = own_advice(parts.advice);
  const Error error = elsewhere ? Error(given.error_class(), parts) : given;
  if (error.error_class() == ErrorClass::kDevice) report_memory(common);
  common.log.event(LogLevel::kError, "error", error.what(),
                   {{"class", to_string(error.error_class())}, {"exit", exit_code(error.error_class())}});
  return exit_code(error.error_class());
}

// As LibTorch's allocator and oneDNN say it, on CPUs; once memory has ended, whatever is said then is about that.
bool wants_memory(std::string_view what) {
  return !reserve() || what.find("allocate memory") != what.npos || what.find("could not create a ") != what.npos;
}

}  // namespace

int run_guarded(const VerbRun& run, Common& common, const std::function<void()>& before_files) {
  try {
    const SignalHandlers handlers(common.cancel);
    open_handles(common, before_files);
    return run(common);
  } catch (const Error& error) {
    return report(common, error);
  } catch (const c10::OutOfMemoryError& error) {
    return report(common, Error(ErrorClass::kDevice, {"memory", error.what_without_backtrace(), "",
                                                      "see emend plan, or use another " + setting("device_map") +
                                                          ", or a smaller " + setting("batch_size")}));
  } catch (const std::bad_alloc&) {
    return report(common, no_memory());
  } catch (const std::filesystem::filesystem_error& error) {
    return report(common, Error(class_of_errno(error.code().value()),
                                {error.path1().string(), error.code().message(), "a place to work in",
                                 "check the path, its permissions and the space"}));
  } catch (const std::system_error& error) {
    return report(common,
                  Error(ErrorClass::kDevice, {"system", error.what(), "the threads and memory that the work needs",
                                              "raise the limits of the process (ulimit -a)"}));
  } catch (const c10::Error& error) {
    if (wants_memory(error.what_without_backtrace())) return report(common, no_memory());
    if (devices::is_device_failure(error))
      return report(common,
                    Error(ErrorClass::kDevice, {"GPU", error.what_without_backtrace(), "a GPU that works",
                                                "run emend doctor --full; a GPU that has failed needs a new process"}));
    common.log.error("error", std::string("internal error: ") + error.what_without_backtrace());
  } catch (const std::exception& error) {
    if (wants_memory(error.what())) return report(common, no_memory());
    common.log.error("error", std::string("internal error: ") + error.what());
  }
  return 1;
}

}  // namespace emend::tools

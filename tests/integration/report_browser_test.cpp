// The report in a real browser: headless Chromium opens it, must report no console message and no request, must draw
// something, and must show the numbers of results.json. Skips where no Chromium is installed.
//
//   EMEND_CHROMIUM        the program; default: chromium, chromium-browser, google-chrome on PATH
//   EMEND_REPORT_DIR      keep the page and its screenshots in this folder
#include <emend/core/atomic_file.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "support/png.h"
#include "support/sample_run.h"

namespace emend::evaluation {
namespace {

namespace fs = std::filesystem;

std::string find_browser() {
  if (const char* named = std::getenv("EMEND_CHROMIUM")) return named;
  const char* path = std::getenv("PATH");
  std::istringstream folders(path ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');)
    for (const char* name : {"chromium", "chromium-browser", "google-chrome"})
      if (fs::exists(fs::path(folder) / name)) return (fs::path(folder) / name).string();
  return "";
}

class Browser : public ::testing::Test {
 protected:
  void SetUp() override {
    browser_ = find_browser();
    if (browser_.empty()) GTEST_SKIP() << "needs Chromium on PATH or EMEND_CHROMIUM";
    const char* kept = std::getenv("EMEND_REPORT_DIR");
    folder_ = kept ? fs::path(kept) : fs::path(::testing::TempDir()) / "emend-report-browser";
    keep_ = kept != nullptr;
    fs::create_directories(folder_);
    run_ = testing::sample_run(32);
    write_report(page(), run_);
  }
  void TearDown() override {
    if (!browser_.empty() && !keep_) fs::remove_all(folder_);
  }
  [[nodiscard]] fs::path page() const { return folder_ / "report.html"; }

  /// Standard output; the browser's log (console messages) goes to `log`.
  std::string browse(const std::string& options, std::string* log = nullptr) {
    const auto out = folder_ / "stdout.txt", err = folder_ / "stderr.txt";
    const std::string command =
        "timeout 120 '" + browser_ +
        "' --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --disable-extensions "
        "--disable-background-networking --disable-component-update --no-first-run --user-data-dir='" +
        (folder_ / "profile").string() + "' --enable-logging=stderr --v=0 " + options + " 'file://" + page().string() +
        "' > '" + out.string() + "' 2> '" + err.string() + "'";
    EXPECT_EQ(std::system(command.c_str()), 0) << read_file(err);
    if (log) *log = read_file(err);
    return read_file(out);
  }

  std::string browser_;
  fs::path folder_;
  RunReport run_;
  bool keep_ = false;
};

TEST_F(Browser, ShowsTheNumbersWithoutConsoleMessagesOrRequests) {
  std::string log;
  const auto net = folder_ / "net.json";
  const std::string dom = browse("--log-net-log='" + net.string() + "' --dump-dom", &log);
  EXPECT_EQ(log.find("CONSOLE"), std::string::npos) << log;
  for (const auto& [family, values] : run_.results["metrics"].items())
    for (const char* when : {"pre", "post"})
      for (const auto& [key, value] : values[when].items()) {
        if (!value.is_number() || key == "n") continue;
        const std::string cell = "data-metric=\"" + family + "." + key + "." + when + "\" data-value=\"";
        const size_t at = dom.find(cell);
        ASSERT_NE(at, std::string::npos) << cell;
        EXPECT_DOUBLE_EQ(std::strtod(dom.c_str() + at + cell.size(), nullptr), value.get<double>()) << cell;
      }
  // The browser's network log names every request that the page caused.
  const std::string requests = fs::exists(net) ? read_file(net) : "";
  ASSERT_NE(requests.find("report.html"), std::string::npos);
  for (size_t at = requests.find("\"initiator\":\"file://"); at != std::string::npos;
       at = requests.find("\"initiator\":\"file://", at + 1))
    ADD_FAILURE() << "the page asked for something: " << requests.substr(at, 200);
}

TEST_F(Browser, DrawsInLightAndDarkAndOnAPhone) {
  struct View {
    const char* name;
    const char* options;
    bool dark;
  };
  for (const View& view : {View{"light", "--window-size=1200,4200", false},
                           {"dark", "--window-size=1200,4200 --blink-settings=preferredColorScheme=0", true},
                           {"phone", "--window-size=500,6000", false}}) {
    const auto shot = folder_ / (std::string(view.name) + ".png");
    fs::remove(shot);
    browse(std::string(view.options) + " --screenshot='" + shot.string() + "'");
    ASSERT_TRUE(fs::exists(shot)) << view.name;
    const auto image = testing::read_png(shot);
    EXPECT_GT(image.distinct_colours(), 40U) << view.name << " is blank";
    EXPECT_EQ(image.mean_brightness() < 110, view.dark) << view.name << ": brightness " << image.mean_brightness();
  }
}

}  // namespace
}  // namespace emend::evaluation

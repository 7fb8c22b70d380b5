// The report in a real browser: headless Chromium opens it, must report no console message and no request, must draw
// something, and must show the numbers of results.json. Skips where no Chromium is installed.
//
//   EMEND_CHROMIUM        the program; default: chromium, chromium-browser, google-chrome on PATH
//   EMEND_REPORT_DIR      keep the page and its screenshots in this folder
#include <emend/core/atomic_file.h>
#include <emend/evaluation/tracing.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <regex>

#include "support/png.h"
#include "support/sample_comparison.h"
#include "support/sample_run.h"

namespace emend::evaluation {
namespace report_browser_test {

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
    run_.results["seconds"]["statistics"] = 200.0;
    run_.results["seconds"]["total"] = 7500.0;
    run_.extras["continuations"][0]["probability_before"] = 0.0004;
    write_file(page(), render_report(run_));
  }
  void TearDown() override {
    if (!browser_.empty() && !keep_) fs::remove_all(folder_);
  }
  [[nodiscard]] fs::path page() const { return folder_ / "report.html"; }

  /// Standard output; the browser's log (console messages) goes to `log`.
  std::string browse(const std::string& options, std::string* log = nullptr, const char* file = "report.html") {
    const auto out = folder_ / "stdout.txt", err = folder_ / "stderr.txt";
    const std::string command =
        "timeout 120 '" + browser_ +
        "' --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --disable-extensions "
        "--disable-background-networking --disable-component-update --no-first-run --user-data-dir='" +
        (folder_ / "profile").string() + "' --enable-logging=stderr --v=0 " + options + " 'file://" +
        (folder_ / file).string() + "' > '" + out.string() + "' 2> '" + err.string() + "'";
    EXPECT_EQ(std::system(command.c_str()), 0) << read_file(err);
    if (log) *log = read_file(err);
    return read_file(out);
  }

  /// The elements that the script has made, as text; neither the script nor the document that it drew.
  std::string drawn(std::string* log = nullptr) {
    const std::string dom = browse("--dump-dom", log);
    const size_t begin = dom.find("<main"), end = dom.find("</main>");
    EXPECT_LT(begin, end) << dom;
    return begin < end ? dom.substr(begin, end - begin) : "";
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

TEST_F(Browser, DrawsEveryPart) {
  const std::string dom = drawn();
  for (const char* part :
       {"What this edit did", "In words", "Measured", "How it went", "Where it ran", "Every edit", "To do it again",
        "Loss while looking for the targets", "Probability of the new answer", "Size of the update",
        "Spectrum of the update", "Against the number of edits", "Retention", "Time by phase", "Peak memory by device",
        "memit_edit --model", "Hyper-parameters", "title=\"Harmonic mean of the three success rates",
        // Numbers for people.
        "134,515,008", "3 min 20 s", "2 h 05 min", "1.8 GiB", "p &lt; 0.001", "93.0 % of the update survived",
        // Round ticks.
        ">20</text>", ">40</text>", ">100</text>", "role=\"img\" aria-label=\"Singular values",
        "<b>31 of 32 facts</b> written with",
        "class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"figures of counterfact\"",
        "aria-label=\"table of every edit\""})
    EXPECT_NE(dom.find(part), std::string::npos) << part;
  const size_t section = dom.find("In words"), failed = dom.find("the loss stayed at 4.1", section),
               first_good = dom.find("<div class=\"card\"><p>", section);
  ASSERT_NE(failed, std::string::npos);
  EXPECT_LT(failed, first_good);
  size_t rows = 0;
  for (size_t at = dom.find("<tr>"); at != std::string::npos; at = dom.find("<tr>", at + 1)) ++rows;
  EXPECT_GT(rows, 32U + 10U + 4U);
}

TEST_F(Browser, ReadsNoTextAsHtmlAndNoScriptButItsOwn) {
  const std::string hostile =
      "</script><script>document.title='x'</script>\"><img src=x onerror=\"document.title='x'\">{{data}}";
  testing::poison(run_, hostile);
  write_file(page(), render_report(run_));
  std::string log;
  const std::string dom = drawn(&log);
  EXPECT_EQ(log.find("CONSOLE"), std::string::npos) << log;
  EXPECT_NE(dom.find("To do it again"), std::string::npos);
  for (const char* part : {"<img", "<script", "<iframe"}) EXPECT_EQ(dom.find(part), std::string::npos) << part;
  EXPECT_NE(dom.find("&lt;img src=x"), std::string::npos) << "shown as it is";
}

TEST_F(Browser, DrawsAComparisonWithTheNumbersOfItsRuns) {
  for (const bool lifelong : {false, true}) {
    const auto table = quality_document(testing::sample_comparison(folder_ / "comparison", lifelong));
    write_file(page(), quality_page(table));
    std::string log;
    const std::string dom = drawn(&log);
    EXPECT_EQ(log.find("CONSOLE"), std::string::npos) << log;
    for (const auto& row : table["rows"])
      for (const auto& [key, figure] : row["figures"].items()) {
        if (!figure["value"].is_number()) continue;
        const std::string cell = "data-metric=\"" + row["name"].get<std::string>() + "|" + key + "\" data-value=\"";
        const size_t at = dom.find(cell);
        ASSERT_NE(at, std::string::npos) << cell;
        EXPECT_DOUBLE_EQ(std::strtod(dom.c_str() + at + cell.size(), nullptr), figure["value"].get<double>()) << cell;
      }
    for (const char* part : {"Editors compared", "Free text against damage", "latch, mean of 2 seeds",
                             "failed: layer 3: not | finite", "memit_edit --editor latch"})
      EXPECT_NE(dom.find(part), std::string::npos) << part;
    EXPECT_EQ(dom.find("WikiText"), std::string::npos) << "any text can be read";
    EXPECT_EQ(dom.find(lifelong ? "measurements of latch, seed 0" : "figures at the end") != std::string::npos, true);
    // The points' numbers stand apart.
    std::vector<std::pair<double, double>> marks;
    const std::regex mark("<text x=\"([0-9.]+)\" y=\"([0-9.]+)\" text-anchor=\"start\" class=\"name\">[0-9, ]+</text>");
    for (std::sregex_iterator one(dom.begin(), dom.end(), mark), end; one != end; ++one)
      marks.emplace_back(std::stod((*one)[1]), std::stod((*one)[2]));
    EXPECT_EQ(marks.size(), 6U) << "the unedited model, the one that is told and four runs";
    for (size_t i = 0; i < marks.size(); ++i)
      for (size_t j = 0; j < i; ++j)
        EXPECT_TRUE(std::fabs(marks[i].first - marks[j].first) > 8 || std::fabs(marks[i].second - marks[j].second) > 13)
            << i << " and " << j;
    for (const char* part :
         {"On the way", "Efficacy of the first 100 facts", "LAMBADA", "collapses at 150 edits", "not by 200"})
      EXPECT_EQ(dom.find(part) != std::string::npos, lifelong) << part;
  }
}

TEST_F(Browser, DrawsRunsWithAlmostNothingAndTrainings) {
  using nlohmann::json;
  RunReport training;
  training.results = {
      {"tune", json::object()}, {"rows", {{"used", 12}}}, {"steps", {{{"loss", 3.5}}, {{"loss", 1.25}}}}};
  training.extras = {{"training_loss", {3.5, 1.25}}};
  RunReport single;
  single.results = {{"protocol", "single"}, {"facts", 2}, {"edits", {{"applied", 2}}}, {"editor", "rome"}};
  RunReport two;  // the median of 0.2 and 0.6, and curves of nothing but 0
  two.extras = {{"curves", {{{"probability", {0.2, 0.2}}}, {{"probability", {0.6, 0.6}}}}}};
  two.results = {{"lifelong", {{{"edits", 1}, {"seconds", 0}}, {{"edits", 2}, {"seconds", 0}}}}};
  const std::pair<RunReport, const char*> cases[] = {
      {{}, "To do it again"},
      {testing::odd_run(), "2 edits"},
      {training, "Loss: first step 3.500, last step 1.250."},
      {single, "<b>2 facts</b> written with <b>rome</b> into <b>a model</b>, each alone and taken back."},
      {two, "d=\"M58.0 145.2L468.0 145.2\""}};
  for (const auto& [run, part] : cases) {
    write_file(page(), render_report(run));
    std::string log;
    const std::string dom = drawn(&log);
    EXPECT_NE(dom.find(part), std::string::npos) << part;
    EXPECT_EQ(dom.find(">-0.4</text>"), std::string::npos) << "what begins at 0 has no less";
    EXPECT_EQ(log.find("CONSOLE"), std::string::npos) << log;
  }
}

TEST_F(Browser, DrawsATrace) {
  TraceSummary summary;
  summary.facts = 1;
  summary.n_layers = 3;
  FactTrace trace;
  trace.fact.subject = "Tower";
  trace.fact.prompt = "The Tower <b> is in";
  trace.tokens = {"The", " <x> & y", " is"};
  trace.subject_begin = 1;
  trace.subject_end = 2;
  trace.answer_text = " Rome";
  trace.clean = 0.9;
  trace.corrupted = 0.05;
  for (TraceKind kind : {TraceKind::kState, TraceKind::kMlp})
    trace.restored[kind] = {{0.1, 0.2, 0.3}, {0.5, 0.6, 0.2}, {0.1, 0.1, 0.7}};
  summary.traces = {trace};
  average(summary, {TraceKind::kState, TraceKind::kMlp});
  write_file(page(), trace_page(summary, "tiny"));
  std::string log;
  const std::string dom = drawn(&log);
  EXPECT_EQ(log.find("CONSOLE"), std::string::npos) << log;
  for (const char* part : {"Where tiny keeps its facts", "Layers to edit",
                           "Average indirect effect, restoring single states", "restoring MLP outputs of 3 layers",
                           "last subject token", "Fact by fact", " &lt;x&gt; &amp; y*", "The Tower &lt;b&gt; is in"})
    EXPECT_NE(dom.find(part), std::string::npos) << part;
  EXPECT_EQ(dom.find("restoring attention"), std::string::npos) << "not traced";
}

TEST_F(Browser, DrawsInLightAndDark) {
  struct View {
    const char* name;
    const char* options;
    bool dark;
  };
  for (const View& view : {View{"light", "--window-size=1200,4200", false},
                           {"dark", "--window-size=1200,4200 --blink-settings=preferredColorScheme=0", true}}) {
    const auto shot = folder_ / (std::string(view.name) + ".png");
    fs::remove(shot);
    browse(std::string(view.options) + " --screenshot='" + shot.string() + "'");
    ASSERT_TRUE(fs::exists(shot)) << view.name;
    const auto image = testing::read_png(shot);
    EXPECT_GT(image.distinct_colours(), 40U) << view.name << " is blank";
    EXPECT_EQ(image.mean_brightness() < 110, view.dark) << view.name << ": brightness " << image.mean_brightness();
  }
}

// A window cannot be as narrow, a frame can. Tables scroll in boxes of their own; the page itself must not be wider.
TEST_F(Browser, FitsAPhone) {
  write_file(folder_ / "phone.html", R"(<iframe id="phone" width="390" height="3000" src="report.html"></iframe><script>
phone.onload = () => { const at = phone.contentDocument.documentElement
  document.title = `${at.clientWidth} wide, needs ${at.scrollWidth}, ${phone.contentDocument.querySelectorAll("svg").length > 3}` }
</script>)");
  const std::string dom = browse("--allow-file-access-from-files --dump-dom", nullptr, "phone.html");
  EXPECT_NE(dom.find("<title>390 wide, needs 390, true</title>"), std::string::npos) << dom.substr(0, 500);
}

}  // namespace report_browser_test
}  // namespace emend::evaluation

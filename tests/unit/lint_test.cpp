// House rules that a compiler does not check. Each rule names the file and line, and says why it is there.
#include <gtest/gtest.h>

#include <map>
#include <regex>
#include <string>
#include <vector>

#include "support/source_tree.h"

namespace lint_test {

using emend::testing::library_folders;
using emend::testing::line_of;
using emend::testing::source_files;
using emend::testing::SourceFile;
using emend::testing::without_comments;

std::vector<SourceFile> library() {
  return source_files(library_folders());
}

std::vector<SourceFile> library_and_tools() {
  auto folders = library_folders();
  folders.push_back("tools");
  return source_files(folders);
}

std::vector<SourceFile> everything() {
  auto folders = library_folders();
  folders.insert(folders.end(), {"tools", "tests", "examples"});
  return source_files(folders);
}

// "file:line: text" of every match of `pattern` in `text`. `hints`: what a line of every match holds one of; other
// lines need no regular expression, which takes most of the time.
std::vector<std::string> matches(const SourceFile& file, const std::string& text, const std::regex& pattern,
                                 const std::vector<std::string>& hints) {
  std::vector<std::string> found;
  size_t number = 0;
  for (size_t begin = 0, end; begin < text.size(); begin = end) {
    end = std::min(text.find('\n', begin), text.size() - 1) + 1;
    const std::string line = text.substr(begin, end - begin);
    ++number;
    if (std::ranges::none_of(hints, [&](const auto& hint) { return line.find(hint) != std::string::npos; })) continue;
    for (std::sregex_iterator match(line.begin(), line.end(), pattern), last; match != last; ++match)
      found.push_back(file.path + ":" + std::to_string(number) + ": " + match->str());
  }
  return found;
}

// without_comments(), once for all rules.
const std::string& code_of(const SourceFile& file, bool blank_strings) {
  static std::map<std::pair<std::string, bool>, std::string> known;
  const auto [at, is_new] = known.try_emplace({file.path, blank_strings});
  if (is_new) at->second = without_comments(file.text, blank_strings);
  return at->second;
}

void expect_none(const std::vector<SourceFile>& files, const std::string& pattern,
                 const std::vector<std::string>& hints, const std::string& reason) {
  ASSERT_FALSE(files.empty());
  const std::regex compiled(pattern);
  for (const auto& file : files) {
    for (const auto& found : matches(file, code_of(file, true), compiled, hints))
      ADD_FAILURE() << found << "\n  " << reason;
  }
}

// The places that may move tensors between devices: the router, the checkpoint loader, and the safetensors writer.
bool may_name_devices(const SourceFile& file) {
  return file.folder == "devices" || file.path.starts_with("models/checkpoint") || file.path == "core/safetensors.cpp";
}

// The arguments of every call `.to(…)` or `->to(…)`, with its line.
struct ToCall {
  std::string arguments;
  size_t line;
};
std::vector<ToCall> to_calls(const std::string& text) {
  std::vector<ToCall> calls;
  const auto skip = [&](size_t at) { return std::min(text.find_first_not_of(" \n", at), text.size()); };
  for (size_t at = text.find("to"); at != std::string::npos; at = text.find("to", at + 1)) {
    const size_t before = at == 0 ? std::string::npos : text.find_last_not_of(" \n", at - 1), open = skip(at + 2);
    if (before == std::string::npos || open == text.size() || text[open] != '(') continue;
    if (text[before] != '.' && (text[before] != '>' || before == 0 || text[before - 1] != '-')) continue;
    const size_t start = open + 1;
    size_t stop = start;
    for (int depth = 1; stop < text.size() && depth > 0; ++stop) {
      depth += text[stop] == '(' ? 1 : text[stop] == ')' ? -1 : 0;
    }
    calls.push_back({text.substr(start, stop - start - 1), line_of(text, start)});
  }
  return calls;
}

// A conversion to a type names one: at::kFloat, x.scalar_type(), some_dtype. Whatever else is handed to .to() may be a
// device in disguise.
bool converts_type_only(const std::string& arguments) {
  static const std::regex device(R"(\b(kCUDA|kCPU|kPrivateUse1|Device|DeviceType|device|devices)\b|device\s*\()");
  static const std::regex dtype(
      R"(dtype|scalar_type|ScalarType|\b(?:at|c10|torch)::k(?:Float|Double|Half|BFloat16|Long|Int|Short|Char|Byte|Bool)\d*\b)",
      std::regex::icase);
  return !std::regex_search(arguments, device) && std::regex_search(arguments, dtype);
}

TEST(Lint, ReadsToCalls) {
  const auto calls = to_calls("a.to(at::kFloat);\nb->to(f(x), g(y)).to(weight.device());");
  ASSERT_EQ(calls.size(), 3U);
  EXPECT_EQ(calls[0].arguments, "at::kFloat");
  EXPECT_EQ(calls[1].arguments, "f(x), g(y)");
  EXPECT_EQ(calls[2].line, 2U);
  EXPECT_TRUE(converts_type_only("at::kFloat"));
  EXPECT_TRUE(converts_type_only("x.scalar_type()"));
  EXPECT_TRUE(converts_type_only("compute_dtype_"));
  EXPECT_FALSE(converts_type_only("at::kCUDA"));
  EXPECT_FALSE(converts_type_only("weight.device(), at::kFloat"));
  EXPECT_FALSE(converts_type_only("target"));
  EXPECT_FALSE(converts_type_only("c10::Device(c10::kCUDA, 1)"));
}

TEST(Lint, BlanksCommentsAndStrings) {
  const std::string text = "a; // .cuda()\nb(\".cuda()\"); /* x\n */ c('\"'); d(R\"(e)\"); f = 1'000;";
  EXPECT_EQ(without_comments(text, true), "a;           \nb(\"       \");     \n    c(' '); d(R\"( )\"); f = 1'000;");
  EXPECT_EQ(without_comments("x // y", false), "x     ");
}

TEST(Lint, OnlyTheRouterMovesTensorsBetweenDevices) {
  for (const auto& file : library_and_tools()) {
    if (may_name_devices(file)) continue;
    const auto& text = code_of(file, true);
    for (const auto& call : to_calls(text)) {
      EXPECT_TRUE(converts_type_only(call.arguments))
          << file.path << ":" << call.line << ": .to(" << call.arguments
          << ")\n  may move a tensor to a device: use devices::route_like; for a type say .to(at::kFloat), "
             ".to(x.scalar_type()) or name the variable …dtype";
    }
    static const std::regex movers(R"((?:\.|->)\s*cuda\s*\(|\bkCUDA\b|\bkPrivateUse1\b)");
    for (const auto& found : matches(file, text, movers, {"cuda", "kCUDA", "kPrivateUse1"})) {
      ADD_FAILURE() << found << "\n  names a device: placement and transfers belong to devices/";
    }
  }
}

TEST(Lint, NobodyIncludesAllOfTorch) {
  for (const auto& file : everything()) {
    const auto& text = code_of(file, false);
    static const std::regex whole(R"(#\s*include\s*[<"]torch/(torch|all|nn|optim|data|extension|script)\.h[>"])");
    for (const auto& found : matches(file, text, whole, {"torch/"}))
      ADD_FAILURE() << found << "\n  takes 17 s to compile: include what is used";
  }
}

TEST(Lint, TheLibraryNeverWritesToStandardOutput) {
  expect_none(
      library(),
      R"(\bstd::(cout|cerr|clog)\b|\b(stdout|STDOUT_FILENO)\b|(^|[^\w])(printf|puts|putchar)\s*\(|\bfmt::print\b)",
      {"std::c", "std", "STD", "print", "put"},
      "the library talks through emend::Log and return values; only tools/ print");
}

TEST(Lint, NoUsingNamespaceOutsideFunctions) {
  for (const auto& file : everything()) {
    static const std::regex anywhere(R"(\busing\s+namespace\b[^;]*)"), first_column(R"(^using\s+namespace\b[^;]*)");
    for (const auto& found :
         matches(file, code_of(file, true), file.is_header() ? anywhere : first_column, {"using"})) {
      ADD_FAILURE() << found << "\n  brings in names that the reader cannot trace";
    }
  }
}

TEST(Lint, HeadersHavePragmaOnce) {
  for (const auto& file : everything()) {
    if (!file.is_header()) continue;
    const auto& text = code_of(file, true);
    const auto first = text.find_first_not_of(" \n");
    EXPECT_TRUE(first != std::string::npos && text.compare(first, 12, "#pragma once") == 0)
        << file.path << ": #pragma once must come first, after the comment";
  }
}

TEST(Lint, SourcesStayReadable) {
  for (const auto& file : everything()) {
    EXPECT_LE(std::ranges::count(file.text, '\n'), 800) << file.path << ": look for a seam";
  }
}

TEST(Lint, NothingIsLeftForLater) {
  // Spelled in two parts so that this file passes.
  const std::vector<std::string> marks = {std::string("TO") + "DO", std::string("FIX") + "ME", std::string("XX") + "X"};
  const std::regex mark("\\b(" + marks[0] + "|" + marks[1] + "|" + marks[2] + ")\\b");
  for (const auto& file : everything()) {
    for (const auto& found : matches(file, file.text, mark, marks))
      ADD_FAILURE() << found << "\n  do it or file an issue";
  }
}

TEST(Lint, TextIsTidy) {
  for (const auto& file : everything()) {
    EXPECT_TRUE(file.text.empty() || file.text.ends_with('\n')) << file.path << ": no line break at the end";
    static const std::regex untidy("\t|[ \r]+\n");
    for (const auto& found : matches(file, file.text, untidy, {"\t", " \n", "\r\n"})) {
      ADD_FAILURE() << found.substr(0, found.rfind(':')) << ": a tab, or blanks at the end of the line";
    }
  }
}

TEST(Lint, EveryTestSourceIsInTheBuild) {
  for (const auto& file : source_files({"tests"}, {".cpp"})) {
    const std::filesystem::path path = file.path;
    if (!path.stem().string().ends_with("_test")) continue;
    const auto list = std::filesystem::path(EMEND_SOURCE_DIR) / path.parent_path() / "CMakeLists.txt";
    EXPECT_TRUE(emend::testing::read_text(list).find(path.stem().string()) != std::string::npos)
        << file.path << " is in no CMakeLists.txt: it is never built";
  }
}

TEST(Lint, EveryLibrarySourceIsInTheBuild) {
  for (const auto& folder : library_folders()) {
    const auto list = emend::testing::read_text(std::filesystem::path(EMEND_SOURCE_DIR) / folder / "CMakeLists.txt");
    std::string defs;
    for (const auto& def : source_files({folder}, {".def"})) defs += def.text;
    for (const auto& file : source_files({folder}, {".cpp"})) {
      const auto stem = std::filesystem::path(file.path).stem().string();
      EXPECT_TRUE(list.find(stem) != std::string::npos || defs.find(stem) != std::string::npos)
          << file.path << " is neither in " << folder << "/CMakeLists.txt nor in a .def list: it is never built";
    }
  }
}

// Programs have options, Python has arguments, others have structs: setting("batch_size") is what each reader can give.
TEST(Lint, TheLibraryNamesNoCommandLineOption) {
  const std::regex option(R"("[^"\n]*--[a-z][a-z-]+[^"\n]*")");
  for (const auto& file : library()) {
    for (const auto& found : matches(file, code_of(file, false), option, {"--"}))
      if (found.find("llama-gguf-split --merge") == std::string::npos && found.find("style=") == std::string::npos)
        ADD_FAILURE() << found << "\n  messages name settings: setting(\"name\") of core/setting.h";
  }
}

// docs/journeys.md follows a fact to the report and a hook to the written weight: its files and functions are there,
// and the roads stay short.
TEST(Lint, JourneysAreCountedAndShort) {
  std::string sources;
  for (const auto& file : library_and_tools()) sources += file.text;
  const std::string page = emend::testing::read_text(EMEND_SOURCE_DIR "/docs/journeys.md");
  const std::regex row(R"(\n\| `([^`]+)` \| ([^|]+) \|)"), name(R"(`(?:[A-Za-z]*::)?([^`]+)`)"),
      total(R"(\n(\d+) files, none)");
  const std::vector<std::pair<std::string, size_t>> most = {{"## From a fact to the report", 35},
                                                            {"## From a hook to the written weight", 14}};
  for (const auto& [heading, files_at_most] : most) {
    const size_t begin = page.find(heading);
    ASSERT_NE(begin, std::string::npos) << heading;
    const std::string road = page.substr(begin, page.find("\n## ", begin + 1) - begin);
    size_t files = 0;
    for (std::sregex_iterator match(road.begin(), road.end(), row), end; match != end; ++match, ++files) {
      const std::string path = (*match)[1], entries = (*match)[2];
      EXPECT_TRUE(std::filesystem::exists(std::filesystem::path(EMEND_SOURCE_DIR) / path)) << path;
      size_t entered = 1;
      for (size_t at = entries.find(", "); at != std::string::npos; at = entries.find(", ", at + 1)) ++entered;
      for (std::sregex_iterator by(entries.begin(), entries.end(), name); by != end; ++by)
        EXPECT_NE((by->str(1).find('/') == std::string::npos ? sources : page).find(by->str(1)), std::string::npos)
            << path << " is said to be entered by " << by->str();
      EXPECT_LE(entered, 4) << path;
    }
    std::smatch said;
    ASSERT_TRUE(std::regex_search(road, said, total)) << heading;
    EXPECT_EQ(std::to_string(files), said[1]) << heading;
    EXPECT_LE(files, files_at_most) << heading;
  }
}

}  // namespace lint_test

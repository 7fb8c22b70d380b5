// House rules that a compiler does not check. Each rule names the file and line, and says why it is there.
#include <gtest/gtest.h>

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

// "file:line: text" of every match of `pattern` in `text`.
std::vector<std::string> matches(const SourceFile& file, const std::string& text, const std::regex& pattern) {
  std::vector<std::string> found;
  for (std::sregex_iterator match(text.begin(), text.end(), pattern), end; match != end; ++match) {
    found.push_back(file.path + ":" + std::to_string(line_of(text, static_cast<size_t>(match->position()))) + ": " +
                    match->str());
  }
  return found;
}

void expect_none(const std::vector<SourceFile>& files, const std::string& pattern, const std::string& reason) {
  ASSERT_FALSE(files.empty());
  const std::regex compiled(pattern);
  for (const auto& file : files) {
    for (const auto& found : matches(file, without_comments(file.text, true), compiled))
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
  static const std::regex call(R"((?:\.|->)\s*to\s*\()");
  std::vector<ToCall> calls;
  for (std::sregex_iterator match(text.begin(), text.end(), call), end; match != end; ++match) {
    const auto start = static_cast<size_t>(match->position() + match->length());
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
    const auto text = without_comments(file.text, true);
    for (const auto& call : to_calls(text)) {
      EXPECT_TRUE(converts_type_only(call.arguments))
          << file.path << ":" << call.line << ": .to(" << call.arguments
          << ")\n  may move a tensor to a device: use devices::route_like; for a type say .to(at::kFloat), "
             ".to(x.scalar_type()) or name the variable …dtype";
    }
    static const std::regex movers(R"((?:\.|->)\s*cuda\s*\(|\bkCUDA\b|\bkPrivateUse1\b)");
    for (const auto& found : matches(file, text, movers)) {
      ADD_FAILURE() << found << "\n  names a device: placement and transfers belong to devices/";
    }
  }
}

TEST(Lint, NobodyIncludesAllOfTorch) {
  for (const auto& file : everything()) {
    const auto text = without_comments(file.text, false);
    static const std::regex whole(R"(#\s*include\s*[<"]torch/(torch|all|nn|optim|data|extension|script)\.h[>"])");
    for (const auto& found : matches(file, text, whole))
      ADD_FAILURE() << found << "\n  takes 17 s to compile: include what is used";
  }
}

TEST(Lint, TheLibraryNeverWritesToStandardOutput) {
  expect_none(
      library(),
      R"(\bstd::(cout|cerr|clog)\b|\b(stdout|STDOUT_FILENO)\b|(^|[^\w])(printf|puts|putchar)\s*\(|\bfmt::print\b)",
      "the library talks through emend::Log and return values; only tools/ print");
}

TEST(Lint, NoUsingNamespaceOutsideFunctions) {
  for (const auto& file : everything()) {
    const auto text = without_comments(file.text, true);
    static const std::regex anywhere(R"(\busing\s+namespace\b[^;]*)");
    static const std::regex first_column(R"(\n(using\s+namespace\b[^;]*))");
    for (const auto& found : matches(file, text, file.is_header() ? anywhere : first_column)) {
      ADD_FAILURE() << found << "\n  brings in names that the reader cannot trace";
    }
  }
}

TEST(Lint, HeadersHavePragmaOnce) {
  for (const auto& file : everything()) {
    if (!file.is_header()) continue;
    const auto text = without_comments(file.text, true);
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
  const std::regex mark(std::string("\\b(TO") + "DO|FIX" + "ME|XX" + "X)\\b");
  auto files = everything();
  for (const auto& file : files) {
    for (const auto& found : matches(file, file.text, mark)) ADD_FAILURE() << found << "\n  do it or file an issue";
  }
}

TEST(Lint, TextIsTidy) {
  for (const auto& file : everything()) {
    EXPECT_TRUE(file.text.empty() || file.text.ends_with('\n')) << file.path << ": no line break at the end";
    static const std::regex untidy("\t|[ \r]+\n");
    for (const auto& found : matches(file, file.text, untidy)) {
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
    if (file.path == "core/setting.cpp") continue;
    for (const auto& found : matches(file, without_comments(file.text, false), option))
      if (found.find("llama-gguf-split --merge") == std::string::npos && found.find("style=") == std::string::npos)
        ADD_FAILURE() << found << "\n  messages name settings: setting(\"name\") of core/setting.h";
  }
}

}  // namespace lint_test

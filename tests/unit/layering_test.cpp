// Each part of the project can be built, tested and reused without the ones above it: includes and link dependencies
// follow the folder graph, and nothing reaches into another folder's private headers.
#include <gtest/gtest.h>

#include <map>
#include <regex>
#include <set>
#include <string>

#include "support/source_tree.h"

namespace layering_test {

using emend::testing::library_folders;
using emend::testing::line_of;
using emend::testing::source_files;
using emend::testing::SourceFile;
using emend::testing::without_comments;

// What each folder may know beside itself. `evaluation` judges any model and therefore knows no editor.
const std::map<std::string, std::set<std::string>>& allowed() {
  static const std::map<std::string, std::set<std::string>> graph = {
      {"core", {}},
      {"devices", {"core"}},
      {"hparams", {"core"}},
      {"datasets", {"core"}},
      {"hooks", {"devices", "core"}},
      {"models", {"hooks", "devices", "core"}},
      {"editors", {"models", "hooks", "devices", "hparams", "datasets", "core"}},
      {"evaluation", {"models", "hooks", "devices", "datasets", "core"}},
      {"workflow", {"evaluation", "editors", "models", "hooks", "devices", "hparams", "datasets", "core"}},
  };
  return graph;
}

struct Include {
  std::string target;  ///< from the top of the repository, "core/error.h"
  size_t line;
};

// Includes of the project's own files: <emend/…> and those in quotes.
std::vector<Include> own_includes(const SourceFile& file) {
  static const std::regex pattern(R"re(#[ \t]*include[ \t]*(?:<emend/([^>]+)>|"([^"]+)"))re");
  const auto text = without_comments(file.text, false);
  std::vector<Include> includes;
  for (std::sregex_iterator match(text.begin(), text.end(), pattern), end; match != end; ++match) {
    std::string target = (*match)[1];
    if (target.empty()) {
      const auto beside = std::filesystem::path(file.path).parent_path() / (*match)[2].str();
      target = beside.lexically_normal().generic_string();
    }
    includes.push_back({target, line_of(text, static_cast<size_t>(match->position()))});
  }
  return includes;
}

std::string top_folder(const std::string& path) {
  return path.substr(0, path.find('/'));
}

TEST(Layering, FindsTheIncludesOfAKnownFile) {
  const SourceFile file{"models/x.cpp", "models",
                        "#include <emend/core/error.h>\n// #include <emend/editors/a.h>\n#include \"detail/b.h\"\n"
                        "#include <vector>\n#include \"../hooks/c.h\"\n"};
  const auto includes = own_includes(file);
  ASSERT_EQ(includes.size(), 3U);
  EXPECT_EQ(includes[0].target, "core/error.h");
  EXPECT_EQ(includes[1].target, "models/detail/b.h");
  EXPECT_EQ(includes[1].line, 3U);
  EXPECT_EQ(includes[2].target, "hooks/c.h");
}

TEST(Layering, TheGraphNamesEveryFolderAndHasNoCycle) {
  for (const auto& folder : library_folders()) ASSERT_TRUE(allowed().contains(folder)) << folder;
  for (const auto& [folder, below] : allowed()) {
    for (const auto& lower : below) {
      EXPECT_FALSE(allowed().at(lower).contains(folder)) << folder << " and " << lower << " allow each other";
      for (const auto& lowest : allowed().at(lower)) {
        EXPECT_TRUE(below.contains(lowest)) << folder << " may use " << lower << " but not its " << lowest;
      }
    }
  }
}

TEST(Layering, IncludesFollowTheGraph) {
  const auto files = source_files(library_folders());
  ASSERT_GT(files.size(), 10U);
  for (const auto& file : files) {
    for (const auto& include : own_includes(file)) {
      const auto to = top_folder(include.target);
      EXPECT_TRUE(to == file.folder || allowed().at(file.folder).contains(to))
          << file.path << ":" << include.line << ": includes " << include.target << "; " << file.folder
          << "/ may not know " << to << "/ (see the graph at the top of this test)";
    }
  }
}

TEST(Layering, IncludedFilesExist) {
  for (const auto& file : source_files(library_folders())) {
    for (const auto& include : own_includes(file)) {
      EXPECT_TRUE(std::filesystem::exists(std::filesystem::path(EMEND_SOURCE_DIR) / include.target))
          << file.path << ":" << include.line << ": " << include.target << " does not exist";
    }
  }
}

TEST(Layering, PrivateHeadersStayPrivate) {
  auto folders = library_folders();
  folders.push_back("tools");
  for (const auto& file : source_files(folders)) {
    for (const auto& include : own_includes(file)) {
      if (include.target.find("/detail/") == std::string::npos) continue;
      EXPECT_EQ(top_folder(include.target), file.folder)
          << file.path << ":" << include.line << ": a private header of another folder";
      EXPECT_FALSE(file.is_header() && !file.is_private())
          << file.path << ":" << include.line << ": a public header includes a private one, which is not installed";
    }
  }
}

TEST(Layering, ProgramsAreTheTop) {
  auto folders = library_folders();
  folders.push_back("tools");
  for (const auto& file : source_files(folders)) {
    for (const auto& include : own_includes(file)) {
      const auto to = top_folder(include.target);
      // The verbs that check a build against recorded numbers run what the tests run.
      const bool oracle = file.path == "tools/verbs/fixture.cpp" && include.target.starts_with("tests/oracle/");
      EXPECT_TRUE(oracle || (to != "tests" && to != "examples")) << file.path << ":" << include.line;
    }
  }
}

// The DEPENDS list of a folder's emend_add_library call.
std::set<std::string> link_dependencies(const std::string& folder) {
  const auto text = emend::testing::read_text(std::filesystem::path(EMEND_SOURCE_DIR) / folder / "CMakeLists.txt");
  std::smatch match;
  if (!std::regex_search(text, match, std::regex(R"(emend_add_library\(\s*)" + folder + R"(\b([^)]*)\))")))
    return {"?"};
  std::set<std::string> names;
  bool inside = false;
  const std::string arguments = match[1];
  static const std::regex word(R"(\S+)");
  for (std::sregex_iterator token(arguments.begin(), arguments.end(), word), end; token != end; ++token) {
    const auto name = token->str();
    if (name == "DEPENDS" || name == "SOURCES" || name == "PRIVATE") {
      inside = name == "DEPENDS";
    } else if (inside) {
      names.insert(name);
    }
  }
  return names;
}

TEST(Layering, LinkDependenciesFollowTheGraph) {
  for (const auto& folder : library_folders()) {
    const auto names = link_dependencies(folder);
    EXPECT_FALSE(names.contains("?")) << folder << "/CMakeLists.txt: no emend_add_library(" << folder << " …)";
    for (const auto& name : names) {
      EXPECT_TRUE(name == "?" || allowed().at(folder).contains(name)) << folder << "/CMakeLists.txt: links " << name;
    }
  }
}

}  // namespace layering_test

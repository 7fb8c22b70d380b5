// Every verb that writes, in places that cannot be written: the right exit status, a message that says where, why and
// what to do, and nothing half-written.
#include <emend/core/staged.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>

#include <iostream>
#include <set>
#include <thread>

#include "cli.h"
#include "support/known_facts.h"
#include "support/program_fixture.h"

namespace emend::testing {
namespace places_test {

namespace fs = std::filesystem;

// A verb's arguments; "OUT" stands for a name in the place, "PLACE" for the place itself.
struct Writing {
  std::string name;
  std::vector<std::string> arguments;
  std::vector<std::string> inputs = {};  // copied into the place
  bool resumable = false;                // leaves what a later run goes on with
};

class PlacesTest : public ProgramTest {
 protected:
  void SetUp() override {
    ::setenv("OMP_NUM_THREADS", "1", 1);
    ProgramTest::SetUp();
    must_run("memit_edit", edit({"--eval", "none", "--save", "pack,peft", "--quiet", "--stats-tokens", "2000"}));
    write_file(folder_ / "other.jsonl",
               R"({"prompt": "{} is a city in", "subject": "Oslo", "target_new": "Peru", "target_true": "Norway"})");
    must_run("memit_edit", edit({"--eval", "none", "--save", "pack", "--quiet", "--stats-tokens", "2000", "--facts",
                                 path("other.jsonl"), "--out", path("other")}));
    a_ = path("run/edit.safetensors");
    b_ = path("other/edit.safetensors");
    must_run("emend", {"apply", a_, b_, "--model", path("model"), "--out", path("edited"), "--quiet"});
    write_file(folder_ / "loud", "a\nb\nc\nd\n");
    write_file(folder_ / "quiet", "e\nf\ng\nh\n");
    must_run("emend", {"direct", "fit", "--model", path("model"), "--positive", path("loud"), "--negative",
                       path("quiet"), "--folds", "2", "--no-effect", "--out", path("direction"), "--quiet"});
    write_known_facts(folder_ / "knowing");
    write_file(folder_ / "chat.jsonl", R"({"instruction": "Say a", "input": "", "output": "a"})");
    mounts_ = ::geteuid() == 0 && ::unshare(CLONE_NEWNS) == 0 &&
              ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
  }
  void TearDown() override {
    if (mounts_) ::umount2(place().c_str(), MNT_DETACH);
    ProgramTest::TearDown();
  }

  [[nodiscard]] fs::path place() const { return folder_ / "place"; }

  [[nodiscard]] std::vector<Writing> writings() const {
    const std::string model = path("model"), facts = path("facts.jsonl");
    auto run =
        edit({"--eval", "none", "--save", "pack,model,gguf,peft,lora", "--stats-tokens", "2000", "--out", "OUT"});
    run.insert(run.begin(), "edit");
    std::vector<Writing> all = {
        {"edit", run, {}, true},
        {"apply --out", {"apply", a_, b_, "--model", model, "--out", "OUT"}},
        {"apply", {"apply", a_, b_, "--model", "PLACE/model"}, {"model"}},
        {"revert --out", {"revert", "--all", "--model", path("edited"), "--out", "OUT"}},
        {"revert", {"revert", "--all", "--model", "PLACE/edited"}, {"edited"}},
        {"reorder", {"reorder", b_, a_, "--model", "PLACE/edited"}, {"edited"}},
        {"merge", {"merge", a_, b_, "--out", "OUT"}},
        {"import", {"import", path("run/adapter"), "--model", model, "--out", "OUT"}},
        {"convert folder", {"convert", model, "OUT"}},
        {"convert gguf", {"convert", model, "OUT.gguf"}},
        {"convert-facts", {"convert-facts", facts, "OUT", "--to", "counterfact"}},
        {"lint --fix", {"lint", facts, "--fix", "--out", "OUT"}},
        {"trace",
         {"trace", "--model", model, "--prompt", "{} is in", "--subject", "Oslo", "--samples", "2", "--out", "OUT"},
         {},
         true},
        {"tune",
         {"tune", "--model", model, "--data", path("chat.jsonl"), "--steps", "1", "--merge", "--out", "OUT"},
         {},
         true},
        {"direct fit",
         {"direct", "fit", "--model", model, "--positive", path("loud"), "--negative", path("quiet"), "--folds", "2",
          "--no-effect", "--out", "OUT"}},
        {"direct ablate",
         {"direct", "ablate", path("direction"), "--model", model, "--no-effect", "--save", "pack,model", "--out",
          "OUT"}},
        {"suggest",
         {"suggest", "--model", path("knowing/model"), "--facts", path("knowing/known.json"), "--dtype", "float32",
          "--layers", "2", "--out", "OUT"}},
        {"stats",
         {"stats", "--model", model, "--layers", "1", "--corpus", path("corpus.txt"), "--stats-tokens", "500",
          "--cache", "OUT"},
         {},
         true},
        {"report", {"report", "PLACE/run"}, {"run"}, true},
        {"--log-file", {"list", "--model", path("edited"), "--log-file", "OUT"}, {}, true},
    };
    for (const char* form : {"pack", "model", "gguf", "peft", "lora"})
      all.push_back({std::string("export ") + form, {"export", a_, "--to", form, "--model", model, "--out", "OUT"}});
    return all;
  }

  // The place, empty but for the inputs.
  void make_place(const Writing& writing, bool mounted) {
    if (mounts_) ::umount2(place().c_str(), MNT_DETACH);
    fs::remove_all(place());
    fs::create_directories(place());
    if (mounted && mounts_) {
      ASSERT_EQ(::mount("tmpfs", place().c_str(), "tmpfs", 0, "size=4m"), 0);
    }
    for (const auto& input : writing.inputs) fs::copy(folder_ / input, place() / input, fs::copy_options::recursive);
  }
  [[nodiscard]] std::map<std::string, std::string> contents() const {
    std::map<std::string, std::string> files;
    if (fs::exists(place()))
      for (const auto& entry : fs::recursive_directory_iterator(place()))
        if (entry.path().filename() != "filler" && entry.path().filename() != "lock")
          files[entry.path().string()] = entry.is_regular_file() ? read_file(entry.path()) : "";
    return files;
  }

  // Runs through a shell that sets limits.
  [[nodiscard]] ProgramResult run(const Writing& writing, const std::string& limits) const {
    std::vector<std::string> words = {"-c", limits + " exec \"$0\" \"$@\"", program_path("emend").string()};
    for (std::string word : writing.arguments) {
      if (word.starts_with("OUT")) word = (place() / ("out" + word.substr(3))).string();
      if (word.starts_with("PLACE")) word = place().string() + word.substr(5);
      words.push_back(word);
    }
    return run_program("/bin/sh", words);
  }

  // What is wrong with how a verb failed; the status if nothing is.
  [[nodiscard]] static std::string fault_of(const ProgramResult& result, const std::vector<int>& expected) {
    const auto has = [&](const char* word) { return result.err.find(word) != std::string::npos; };
    if (std::find(expected.begin(), expected.end(), result.status) == expected.end())
      return "status " + std::to_string(result.status);
    if (result.status == 0) return "0";
    if (has("internal error") || has("terminate") || has("what():")) return "no message of ours";
    if (has(".tmp-")) return "a name that users do not know";
    if (!has(": ") || !has(";")) return "not all parts: " + result.err;
    return std::to_string(result.status);
  }

  // One row of the table: what a verb does under each condition.
  void row(const Writing& writing) {
    std::string line = writing.name + std::string(writing.name.size() < 16 ? 16 - writing.name.size() : 0, ' ');
    const auto judge = [&](const std::string& condition, const ProgramResult& result, const std::vector<int>& expected,
                           const std::map<std::string, std::string>* before) {
      const std::string fault = fault_of(result, expected);
      EXPECT_EQ(fault, std::to_string(result.status)) << writing.name << ", " << condition << ": " << result.err;
      const bool whole = result.status == 0 || !before || writing.resumable || contents() == *before;
      EXPECT_TRUE(whole) << writing.name << ", " << condition << " left something: " << result.err;
      EXPECT_FALSE(result.status != 0 && fs::exists(place() / "out" / "results.json")) << writing.name;
      line += "  " + condition + " " + std::to_string(result.status);
    };
    make_place(writing, true);
    auto before = contents();
    fill();
    judge("full", run(writing, mounts_ ? "" : "ulimit -f 0;"),
          writing.name == "--log-file" ? std::vector{0} : std::vector{3}, &before);

    if (mounts_ || ::geteuid() != 0) {  // permissions do not bind root
      make_place(writing, true);
      lock_place(true);
      judge("read-only", run(writing, ""), {2, 3}, &before);
      lock_place(false);
    }

    make_place(writing, false);
    std::atomic<bool> done{false};
    std::thread vanishing([&] {
      while (!done) {
        std::error_code ignored;
        fs::remove_all(place(), ignored);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    const auto vanished = run(writing, "");
    done = true;
    vanishing.join();
    judge("vanishing", vanished, {0, 2, 3}, nullptr);

    make_place(writing, false);
    before = contents();
    judge("descriptors", run(writing, "ulimit -n 20;"), {0, 3, 5}, &before);

    make_place(writing, false);
    // A library that gets no stack for a thread of its own may end the process; then nothing may be left all the same.
    const auto starved = run(writing, "ulimit -v " + std::to_string(memory_kib_) + ";");
    if (starved.status < 128) {
      judge("memory", starved, {0, 5}, &before);
    } else {
      EXPECT_TRUE(writing.resumable || contents() == before) << writing.name << ", killed, left something";
      line += "  memory " + std::to_string(starved.status);
    }
    std::cout << "[ figure   ] " << line << '\n';
  }

  void fill() const {
    if (!mounts_) return;
    const std::string block(4096, 'x');
    FILE* file = std::fopen((place() / "filler").c_str(), "w");
    while (std::fwrite(block.data(), 1, block.size(), file) == block.size() && std::fflush(file) == 0) {
    }
    std::fclose(file);
  }
  void lock_place(bool locked) const {
    if (mounts_) {
      ::mount(nullptr, place().c_str(), nullptr, MS_REMOUNT | (locked ? MS_RDONLY : 0), nullptr);
      return;
    }
    const auto change = locked ? fs::perm_options::remove : fs::perm_options::add;
    fs::permissions(place(), fs::perms::owner_write, change);
    for (const auto& entry : fs::recursive_directory_iterator(place()))
      fs::permissions(entry.path(), fs::perms::owner_write, change);
  }

  // Address space in which the program starts and has little left.
  void find_memory() {
    int64_t low = 100 << 10, high = 8 << 20;
    while (high - low > (4 << 10)) {
      const int64_t middle = (low + high) / 2;
      const auto result = run({"", {"list", "--model", path("edited")}}, "ulimit -v " + std::to_string(middle) + ";");
      (result.status == 0 ? high : low) = middle;
    }
    memory_kib_ = high;
  }

  std::string a_, b_;
  bool mounts_ = false;
  int64_t memory_kib_ = 0;
};

TEST_F(PlacesTest, EveryVerbThatWrites) {
  find_memory();
  std::cout << "[ figure   ] " << (mounts_ ? "mounted places" : "limits of size and permissions") << ", memory "
            << memory_kib_ / 1024 << " MiB\n";
  for (const auto& writing : writings()) row(writing);
}

// Wherever memory ends, status 5 says so: in a mapped checkpoint, in a JSON document whose destructor needs memory too.
TEST_F(PlacesTest, MemoryThatEndsIsSaidWhereverThatIs) {
  find_memory();
  std::set<int> seen;
  for (const auto& writing : writings())
    if (writing.name == "convert gguf" || writing.name == "export gguf")
      for (int64_t more = -2; more <= 6; ++more) {
        make_place(writing, false);
        const auto before = contents();
        const auto result = run(writing, "ulimit -v " + std::to_string(memory_kib_ + more * 1024) + ";");
        EXPECT_EQ(fault_of(result, {0, 5}), std::to_string(result.status))
            << writing.name << ", " << more << " MiB: " << result.err;
        remove_abandoned(place(), std::chrono::seconds(0));  // of a process that ended in a destructor
        EXPECT_TRUE(result.status == 0 || contents() == before) << writing.name << ", " << more << " MiB";
        seen.insert(result.status);
      }
  EXPECT_TRUE(seen.contains(5)) << "nothing was refused";
}

// What may not throw, as a document's destructor, ends the process: with the same status and message.
TEST(MemoryTest, ItsEndInADestructorIsSaidToo) {
  struct Document {
    ~Document() { std::vector<char> stack(std::numeric_limits<ptrdiff_t>::max()); }
  };
  const auto work = [](tools::Common&) {
    const Document document;
    return 0;
  };
  tools::Common common;
  EXPECT_EXIT(std::exit(tools::run_guarded(work, common, [] {})), ::testing::ExitedWithCode(5),
              "error: memory: the machine has no memory left; ");
}

}  // namespace places_test
}  // namespace emend::testing

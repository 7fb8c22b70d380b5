// Whatever is applied, reverted, reordered, merged, edited again and saved, and wherever a process is killed or the
// disk full, the weights are what is in force makes of the original, nothing else changes, and the next command leaves
// no junk.
//
// Each sequence follows from its seed: also the moments of kills and full disks, which are counted in calls of the
// system. EMEND_SEQUENCES sets how many there are.
#include <ATen/Parallel.h>
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/staged.h>
#include <emend/editors/packs/ledger.h>
#include <emend/models/checkpoint.h>
#include <emend/models/gguf/convert.h>
#include <emend/models/model.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <cstdlib>
#include <deque>
#include <iostream>
#include <random>

#include "support/disk_trouble.h"
#include "support/pack_oracle.h"
#include "support/temporary_folder.h"
#include "support/tiny_model.h"

namespace emend::testing {
namespace sequences_test {

namespace fs = std::filesystem;
using disk_trouble::calls_left;
using disk_trouble::Trouble;
using disk_trouble::trouble;
using editors::EditPack;
using editors::Ledger;

constexpr int kSequences = 20, kSteps = 12;

struct Figures {
  int sequences = 0, steps = 0, refused = 0, killed = 0, full = 0;
  std::map<std::string, int> verbs;
};

class Sequence {
 public:
  Sequence(const fs::path& root, uint32_t seed, Figures& figures)
      : root_(root), random_(seed), seed_(seed), figures_(figures) {
    fs::remove_all(root_);
    write_original(seed % 3 == 0 ? at::kBFloat16 : at::kFloat);
    fingerprint_ = models::model_fingerprint(*models::open_checkpoint((root_ / "model").string()));
    for (int i = 0; i < 8; ++i) add_pack(i);
    if (seed % 4 == 1) begin_with_gguf();
    base_ = models::model_fingerprint(*models::open_checkpoint(current_.string()));
    for (const auto& [path, bytes] : files_under(current_)) originals_[fs::relative(path, current_)] = bytes;
  }

  void run() {
    for (int step = 0; step < kSteps && !::testing::Test::HasFailure(); ++step) {
      const std::string what = "seed " + std::to_string(seed_) + ", step " + std::to_string(step);
      SCOPED_TRACE(what);
      ++figures_.steps;
      random_step();
      check();
    }
    trouble = Trouble::kNone;
    Ledger(current_).revert_all();
    active_.clear();
    check();
    ++figures_.sequences;
  }

 private:
  int pick(size_t n) { return static_cast<int>(random_() % n); }

  // Two weight files, so that a change of both can stop half way.
  void write_original(at::ScalarType dtype) {
    current_ = root_ / "model";
    write_tiny_model(current_, 1 + seed_ % 5);
    std::vector<std::pair<std::string, at::Tensor>> shards[2];
    nlohmann::json index = {{"metadata", {{"total_size", 0}}}, {"weight_map", nlohmann::json::object()}};
    const char* names[2] = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"};
    {
      const SafetensorsFile file(current_ / "model.safetensors");
      for (const auto& [name, info] : file.tensors()) {
        const int shard = name.find("layers.1.") != std::string::npos;
        shards[shard].emplace_back(name, file.tensor(name).to(dtype));
        index["weight_map"][name] = names[shard];
      }
      for (int i = 0; i < 2; ++i) write_safetensors(current_ / names[i], shards[i], {{"format", "pt"}});
    }
    fs::remove(current_ / "model.safetensors");
    write_file(current_ / "model.safetensors.index.json", index.dump());
  }

  // The folder that a GGUF file gives, which the packs are then applied to.
  void begin_with_gguf() {
    const fs::path file = root_ / "model.gguf";
    (void)models::convert_model((root_ / "model").string(), file, {.vocabulary = false});
    models::LoadOptions options;
    options.tokenizer = false;
    const auto model = models::load_model(file.string(), options);
    gguf_ = model.fingerprint();
    current_ = root_ / "from-gguf";
    models::save_model(model, current_);
  }

  EditPack random_pack(int question, int answer) {
    EditPack pack;
    pack.base_fingerprint = fingerprint_;
    pack.editor = "memit";
    pack.hparams = pack.extra = nlohmann::json::object();
    pack.facts = {{{"prompt", "{} is in"},
                   {"subject", "S" + std::to_string(question)},
                   {"target_new", "T" + std::to_string(answer)}}};
    for (int layer = 0; layer < 3; ++layer) {
      if (pick(3) == 0) continue;
      editors::WeightDelta delta;
      delta.weight = "model.layers." + std::to_string(layer) + ".mlp.down_proj.weight";
      delta.layer = layer;
      delta.left_DR = at::randn({32, 2}, at::kDouble);
      delta.right_FR = at::randn({48, 2}, at::kDouble);
      pack.deltas.push_back(delta);
    }
    return pack;
  }

  // 0 to 4 go together; 5 contradicts 0; 6 is damaged; 7 is for another model.
  void add_pack(int number) {
    at::manual_seed(seed_ * 100 + static_cast<uint64_t>(number));
    auto pack = random_pack(number == 5 ? 0 : number, number);
    if (number == 7) pack.base_fingerprint = std::string(64, '7');
    const fs::path path = root_ / "packs" / ("pack" + std::to_string(number) + ".safetensors");
    fs::create_directories(path.parent_path());
    editors::save_pack(path, pack);
    if (number == 6) {
      std::string bytes = read_file(path);
      bytes[bytes.size() - 9] ^= 1;
      write_file(path, bytes);
    }
    remember(path, pack, number < 6);
  }

  const KnownPack& remember(const fs::path& path, const EditPack& pack, bool usable) {
    packs_.push_back({path, editors::pack_id(path), pack, usable});
    packs_.back().pack.id = packs_.back().id;
    return packs_.back();
  }

  [[nodiscard]] const KnownPack* by_id(const std::string& id) const {
    for (const auto& known : packs_)
      if (known.id == id) return &known;
    return nullptr;
  }

  // ---- what should happen

  // Facts of packs that do not lie on each other.
  [[nodiscard]] static bool contradict(const KnownPack& a, const KnownPack& b) {
    const auto on = [](const KnownPack& upper, const KnownPack& lower) {
      const auto& edits = upper.pack.under.edits;
      return std::find(edits.begin(), edits.end(), lower.id) != edits.end();
    };
    if (on(a, b) || on(b, a)) return false;
    for (const auto& one : a.pack.facts)
      for (const auto& other : b.pack.facts)
        if (one["subject"] == other["subject"]) return true;
    return false;
  }

  [[nodiscard]] bool may_apply(const std::vector<const KnownPack*>& packs, bool allow) const {
    auto active = active_;
    for (const KnownPack* known : packs) {
      if (!known->usable || std::find(active.begin(), active.end(), known->id) != active.end()) return false;
      if (known->pack.base_fingerprint != base_)  // what lies under an edit may have changed nothing
        for (const auto& id : known->pack.under.edits)
          if (std::find(active.begin(), active.end(), id) == active.end()) return false;
      for (const auto& id : active)
        if (!allow && contradict(*known, *by_id(id))) return false;
      active.push_back(known->id);
    }
    return true;
  }

  // ---- steps

  void random_step() {
    switch (pick(9)) {
      case 0:
      case 1:
      case 2:
        return apply();
      case 3:
        return revert();
      case 4:
        return reorder();
      case 5:
        return merge();
      case 6:
        return edit_again();
      case 7:
        return save_gguf();
      default:
        return copy();
    }
  }

  void apply() {
    std::vector<const KnownPack*> chosen;
    std::vector<fs::path> paths;
    for (int n = 1 + pick(3); n > 0; --n) {
      chosen.push_back(&packs_[static_cast<size_t>(pick(packs_.size()))]);
      paths.push_back(chosen.back()->path);
    }
    const bool allow = pick(3) == 0;
    auto after = active_;
    for (const KnownPack* known : chosen) after.push_back(known->id);
    editors::ApplyPackOptions options{.allow_conflicts = allow};
    if (!gguf_.empty()) options.accepted_bases = {fingerprint_};
    change("apply", may_apply(chosen, allow), after, [=](Ledger& ledger) { ledger.apply(paths, options); });
  }

  void revert() {
    if (pick(4) == 0) return change("revert", true, {}, [](Ledger& ledger) { ledger.revert_all(); });
    std::vector<std::string> ids, after = active_;
    bool good = true;
    for (int n = 1 + pick(2); n > 0; --n) {
      ids.push_back(packs_[static_cast<size_t>(pick(packs_.size()))].id);
      good = std::erase(after, ids.back()) > 0 && good;
    }
    change("revert", good, after, [=](Ledger& ledger) { ledger.revert(ids); });
  }

  void reorder() {
    auto order = active_;
    std::shuffle(order.begin(), order.end(), random_);
    const bool good = pick(4) != 0 || order.empty();
    if (!good) order.pop_back();
    change("reorder", good, order, [=](Ledger& ledger) { ledger.reorder(order); });
  }

  // Two packs of the pool as one, which joins it.
  void merge() {
    const KnownPack &a = packs_[static_cast<size_t>(pick(packs_.size()))],
                    &b = packs_[static_cast<size_t>(pick(packs_.size()))];
    const fs::path out = root_ / "packs" / ("merged" + std::to_string(packs_.size()) + ".safetensors");
    const bool base = a.pack.root() == b.pack.root();
    attempt("merge", a.usable && b.usable && base && !contradict(a, b), out, [=] {
      const std::vector<editors::NamedPack> both = {{"a", editors::load_pack(a.path)},
                                                    {"b", editors::load_pack(b.path)}};
      editors::save_pack(out, editors::merge_packs(both).pack);
    });
    if (!fs::exists(out)) return;
    remember(out, editors::load_pack(out), true);
  }

  // A pack that was made for what the folder is now.
  void edit_again() {
    at::manual_seed(random_());
    EditPack pack = random_pack(pick(5), 10 + pick(5));
    const auto lineage = editors::lineage_of(current_);
    pack.base_fingerprint = models::model_fingerprint(*models::open_checkpoint(current_.string()));
    if (!lineage.edits.empty()) pack.under = lineage;
    const fs::path path = root_ / "packs" / ("again" + std::to_string(packs_.size()) + ".safetensors");
    editors::save_pack(path, pack);
    const KnownPack& known = remember(path, pack, true);
    auto after = active_;
    after.push_back(known.id);
    change("edit again", may_apply({&known}, false), after, [=](Ledger& ledger) { ledger.apply({path}); });
  }

  void save_gguf() {
    const fs::path out = root_ / "saved.gguf";
    fs::remove(out);
    attempt("save", true, out, [this, out] {
      models::ConvertOptions options{.vocabulary = false};
      for (const auto& [name, pack] : editors::packs_in_force(current_))
        options.edits.push_back(editors::describe_edit(pack));
      (void)models::convert_model(current_.string(), out, options);
    });
    if (!fs::exists(out)) return;
    const auto file = models::open_checkpoint(out.string()), folder = models::open_checkpoint(current_.string());
    for (const auto& tensor : folder->tensors())
      EXPECT_TRUE(at::equal(file->read(tensor.name).to(at::kFloat), folder->read(tensor.name).to(at::kFloat)))
          << tensor.name;
    fs::remove(out);
  }

  // An edited copy; the sequence goes on in it.
  void copy() {
    const fs::path from = current_, to = root_ / ("copy" + std::to_string(copies_++));
    const KnownPack& known = packs_[static_cast<size_t>(pick(packs_.size()))];
    auto after = active_;
    after.push_back(known.id);
    editors::ApplyPackOptions options;
    if (!gguf_.empty()) options.accepted_bases = {fingerprint_};
    attempt("apply elsewhere", may_apply({&known}, false), to, [=] {
      editors::write_edited_folder(
          to, [&](const fs::path& folder) { editors::copy_model_folder(from, folder); },
          [&](Ledger& ledger) { ledger.apply({known.path}, options); }, false, {});
    });
    if (!fs::exists(to)) return;
    check();  // the source has not changed
    current_ = to;
    active_ = after;
  }

  void change(const std::string& verb, bool good, const std::vector<std::string>& after,
              const std::function<void(Ledger&)>& work) {
    const auto before = active_;
    attempt(verb, good, {}, [&] {
      Ledger ledger(current_);
      work(ledger);
    });
    std::vector<std::string> now;
    for (const auto& entry : Ledger(current_).entries())
      if (entry.active) now.push_back(entry.id);
    if (outcome_ == Trouble::kKill) {
      EXPECT_TRUE(now == before || now == after) << verb << " that was killed left something else in force";
      active_ = now;
    } else {
      active_ = done_ ? after : before;
      EXPECT_EQ(now, active_) << verb;
    }
  }

  // Runs `work`, perhaps with trouble at a random moment, and checks that it succeeds exactly if it is `good` and
  // undisturbed. `out` is the only place outside the current folder that may change.
  void attempt(const std::string& verb, bool good, const fs::path& out, const std::function<void()>& work) {
    ++figures_.verbs[verb];
    const int kind = pick(4);
    outcome_ = kind == 0 ? Trouble::kKill : kind == 1 ? Trouble::kFull : Trouble::kNone;
    const int moment = pick(40);
    Files outside = elsewhere(out);
    done_ = false;
    if (outcome_ == Trouble::kKill) {
      if (const auto ended = ended_before(moment, work)) {
        done_ = *ended;
        outcome_ = Trouble::kNone;
        figures_.refused += !done_;
        EXPECT_EQ(done_, good) << verb;
      }
    } else {
      calls_left = moment;
      trouble = outcome_;
      std::string refusal;
      try {
        work();
        done_ = true;
      } catch (const Error& error) {
        refusal = error.what();
        EXPECT_EQ(refusal.find(".tmp-"), std::string::npos) << "names a place that users do not know: " << refusal;
      }
      const bool struck = trouble == Trouble::kFull && calls_left < 0;
      trouble = Trouble::kNone;
      if (!done_) ++(struck ? figures_.full : figures_.refused);
      EXPECT_TRUE(done_ == good || (struck && !done_))
          << verb << " should " << (good ? "succeed" : "be refused") << ": " << refusal;
      EXPECT_FALSE(!done_ && !out.empty() && fs::exists(out)) << verb << " left " << out;
    }
    if (outcome_ == Trouble::kKill) ++figures_.killed;
    if (outcome_ == Trouble::kKill && !out.empty()) {
      remove_abandoned_of(out);  // as the next command for this place does
      EXPECT_TRUE(good || !fs::exists(out)) << verb;
    }
    if (outcome_ == Trouble::kKill && out.empty()) (void)Ledger(current_);
    EXPECT_EQ(elsewhere(out) == outside, true) << verb << " changed something else";
  }

  // Whether the work succeeded, if it had ended when it was to be killed.
  static std::optional<bool> ended_before(int moment, const std::function<void()>& work) {
    const pid_t child = ::fork();
    if (child == 0) {
      calls_left = moment;
      trouble = Trouble::kKill;
      try {
        work();
      } catch (...) {
        ::_exit(1);
      }
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    if (!WIFEXITED(status)) return std::nullopt;
    return WEXITSTATUS(status) == 0;
  }

  // Everything but the current folder and the named place.
  [[nodiscard]] Files elsewhere(const fs::path& out) const {
    Files files = files_under(root_);
    std::erase_if(files, [&](const auto& file) {
      const auto below = [&](const fs::path& place) {
        return !place.empty() && (file.first == place.string() || file.first.starts_with(place.string() + "/"));
      };
      return below(current_) || below(out);
    });
    return files;
  }

  // The current folder holds what is in force, and nothing else has changed or come.
  void check() {
    { const Ledger ledger(current_); }
    std::vector<const KnownPack*> in_force;
    for (const auto& id : active_) in_force.push_back(by_id(id));
    Files files;
    for (const auto& [path, bytes] : files_under(current_)) files[fs::relative(path, current_)] = bytes;
    for (const auto& [name, bytes] : originals_) {
      const bool weights = name.ends_with(".safetensors");
      const auto file = files.find(name);
      ASSERT_NE(file, files.end()) << name;
      EXPECT_EQ(file->second == (weights ? expected_bytes(original_of(name), in_force) : bytes), true) << name;
      files.erase(file);
    }
    for (const auto& [name, bytes] : files) {
      const std::string id = fs::path(name).stem().string();
      const bool ours = name == ".emend" || name == ".emend/lock" || name == ".emend/ledger.json" ||
                        name == ".emend/originals.safetensors" || name == ".emend/packs" ||
                        (name.starts_with(".emend/packs/") && by_id(id) && read_file(by_id(id)->path) == bytes);
      EXPECT_TRUE(ours) << name << " was left";
    }
  }

  [[nodiscard]] fs::path original_of(const std::string& name) const {
    const fs::path kept = root_ / "originals" / name;
    if (!fs::exists(kept)) {
      fs::create_directories(kept.parent_path());
      write_file(kept, originals_.at(name));
    }
    return kept;
  }

  fs::path root_, current_;
  std::mt19937 random_;
  uint32_t seed_;
  Figures& figures_;
  std::string fingerprint_, base_, gguf_;
  std::deque<KnownPack> packs_;
  std::vector<std::string> active_;
  Files originals_;
  Trouble outcome_ = Trouble::kNone;
  bool done_ = false;
  int copies_ = 0;
};

TEST(Sequences, WhatIsInForceDecidesEveryByte) {
  if (fs::is_directory("/dev/shm")) ::setenv("TMPDIR", "/dev/shm", 1);  // kills lose nothing that was written
  at::set_num_threads(1);
  const TemporaryFolder folder("sequences");
  const char* asked = std::getenv("EMEND_SEQUENCES");
  const int wanted = asked ? std::atoi(asked) : kSequences;
  const auto begin = std::chrono::steady_clock::now();
  Figures figures;
  for (int seed = 0; seed < wanted && !HasFailure(); ++seed) Sequence(folder / "s", seed, figures).run();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::cout << "[ figure   ] " << figures.sequences << " sequences, " << figures.steps << " steps in " << seconds
            << " s; refused " << figures.refused << ", full disk " << figures.full << ", killed " << figures.killed
            << ";";
  for (const auto& [verb, n] : figures.verbs) std::cout << "  " << verb << " " << n;
  std::cout << '\n';
  EXPECT_EQ(figures.sequences, wanted);
}

}  // namespace sequences_test
}  // namespace emend::testing

// Folders and packs from elsewhere: links that leave the folder, pipes that never end, pickles, names that lead out.
#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/safetensors.h>
#include <emend/core/staged.h>
#include <emend/editors/packs/ledger.h>
#include <emend/editors/packs/pack.h>
#include <emend/models/checkpoint.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <chrono>
#include <functional>

#include "support/error_of.h"
#include "support/temporary_folder.h"
#include "support/tiny_model.h"

namespace emend {
namespace links_hostile_test {

namespace fs = std::filesystem;

class LinksHostile : public ::testing::Test {
 protected:
  void SetUp() override {
    testing::write_tiny_model(model());
    write_file(root_ / "secret.txt", "the password");
  }
  [[nodiscard]] fs::path model() const { return root_ / "model"; }

  // Refused with this class and these words, within a second.
  static void expect_refused(const std::function<void()>& action, ErrorClass error_class,
                             const std::vector<std::string>& words) {
    const auto begin = std::chrono::steady_clock::now();
    testing::expect_refused(action, error_class, words);
    EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), 1.0);
  }
  void expect_model_refused(ErrorClass error_class, const std::vector<std::string>& words) const {
    expect_refused([&] { (void)models::load_model(model().string()); }, error_class, words);
  }

  const testing::TemporaryFolder folder_{"links_hostile"};
  const fs::path root_ = folder_.path();
};

TEST_F(LinksHostile, LinksThatLeaveTheFolder) {
  fs::create_symlink(root_ / "secret.txt", model() / "notes.txt");
  expect_model_refused(ErrorClass::kInvalidArgument, {"notes.txt", "symbolic link", "EMEND_FOLLOW_LINKS"});
  ::setenv("EMEND_FOLLOW_LINKS", "1", 1);
  EXPECT_NO_THROW((void)models::load_model(model().string()));
  ::unsetenv("EMEND_FOLLOW_LINKS");
  fs::remove(model() / "notes.txt");
  fs::create_symlink("../secret.txt", model() / "merges.txt");
  expect_model_refused(ErrorClass::kInvalidArgument, {"merges.txt"});
  fs::remove(model() / "merges.txt");
  fs::rename(model() / "model.safetensors", root_ / "weights.safetensors");
  fs::create_symlink(root_ / "weights.safetensors", model() / "model.safetensors");
  expect_model_refused(ErrorClass::kInvalidArgument, {"model.safetensors", "copy the file"});
}

TEST_F(LinksHostile, LinksWithinTheFolderAndToTheFolderAreFine) {
  fs::rename(model() / "model.safetensors", model() / "weights.bytes");
  fs::create_symlink("weights.bytes", model() / "model.safetensors");
  EXPECT_NO_THROW((void)models::load_model(model().string()));
  fs::create_directory_symlink(model(), root_ / "link");
  EXPECT_NO_THROW((void)models::load_model((root_ / "link").string()));
}

TEST_F(LinksHostile, CopiesOfAFolderDoNotCarryFilesFromElsewhere) {
  fs::create_symlink(root_ / "secret.txt", model() / "notes.txt");
  expect_refused([&] { editors::copy_model_folder(model(), root_ / "copy"); }, ErrorClass::kInvalidArgument,
                 {"notes.txt", "symbolic link"});
  EXPECT_FALSE(fs::exists(root_ / "copy" / "notes.txt"));
}

TEST_F(LinksHostile, PipesAndDevicesDoNotHold) {
  for (const char* name : {"config.json", "model.safetensors"}) {
    testing::write_tiny_model(model());
    fs::remove(model() / name);
    ASSERT_EQ(::mkfifo((model() / name).c_str(), 0600), 0);
    expect_model_refused(ErrorClass::kIo, {name, "pipe"});
    fs::remove(model() / name);
  }
  expect_refused([] { (void)editors::load_pack("/dev/zero"); }, ErrorClass::kIo, {"/dev/zero"});
}

TEST_F(LinksHostile, WhatIsWrittenReplacesNoDeviceAndNoLinkToNothing) {
  ASSERT_EQ(::mkfifo((root_ / "pipe").c_str(), 0600), 0);
  fs::create_symlink("pipe", root_ / "to-pipe");
  fs::create_symlink("nowhere", root_ / "to-nothing");
  std::vector<std::pair<std::string, std::string>> places = {
      {"pipe", "a device or a pipe"}, {"to-pipe", "a device or a pipe"}, {"to-nothing", "not there"}};
  if (::mknod((root_ / "null").c_str(), S_IFCHR | 0600, makedev(1, 3)) == 0)  // as the super-user
    places.emplace_back("null", "a device or a pipe");
  for (const auto& [name, word] : places) {
    const fs::path path = root_ / name;
    const auto before = fs::symlink_status(path).type();
    expect_refused([&] { write_file(path, "text"); }, ErrorClass::kInvalidArgument, {path, word});
    expect_refused([&] { write_safetensors(path, {}, {}); }, ErrorClass::kInvalidArgument, {path, word});
    expect_refused([&] { clone_file(root_ / "secret.txt", path); }, ErrorClass::kInvalidArgument, {path, word});
    EXPECT_EQ(fs::symlink_status(path).type(), before) << name;
  }
  for (const auto& entry : fs::directory_iterator(root_))
    EXPECT_EQ(entry.path().string().find(".tmp-"), std::string::npos) << entry.path();
  EXPECT_FALSE(fs::exists(root_ / "nowhere"));
  // A link to a file is replaced: what it leads to may be anybody's.
  fs::create_symlink("secret.txt", root_ / "to-secret");
  write_file(root_ / "to-secret", "text");
  EXPECT_EQ(read_file(root_ / "secret.txt"), "the password");
  EXPECT_EQ(read_file(root_ / "to-secret"), "text");
}

TEST_F(LinksHostile, PicklesAreNeverOpened) {
  for (const std::string& begin :
       {std::string("PK\x03\x04\x00\x00\x08\x08", 8), std::string("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46", 8)}) {
    const std::string bytes = begin + std::string(1000, 'x');
    write_file(root_ / "edit.pt", bytes);
    expect_refused([&] { (void)editors::load_pack(root_ / "edit.pt"); }, ErrorClass::kUnsupported,
                   {"edit.pt", "pickle", "weights_only=True", "save_file"});
    expect_refused([&] { (void)models::open_checkpoint((root_ / "edit.pt").string()); }, ErrorClass::kUnsupported,
                   {"pickle", "safe_serialization"});
    write_file(model() / "model.safetensors", bytes);
    expect_model_refused(ErrorClass::kUnsupported, {"pickle", "convert once in Python"});
  }
  fs::rename(model() / "model.safetensors", model() / "pytorch_model.bin");
  expect_model_refused(ErrorClass::kUnsupported, {"pickle", "safe_serialization"});
}

TEST_F(LinksHostile, HugeHeadersAndCountsAreRefusedAtOnce) {
  const auto with_length = [&](uint64_t length, const std::string& rest) {
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &length, 8);
    write_file(root_ / "bad.safetensors", bytes + rest);
    expect_refused([&] { (void)SafetensorsFile(root_ / "bad.safetensors"); }, ErrorClass::kCorruption,
                   {"bad.safetensors"});
  };
  with_length(UINT64_MAX, "{}");
  with_length(uint64_t{1} << 40, "{}");
  with_length(99'999'999, "{}");
  const std::string deep(200'000, '[');
  with_length(deep.size(), deep);
  std::string many = "{";
  for (int i = 0; i < 20'000; ++i)
    many +=
        (i ? "," : "") + ("\"t" + std::to_string(i) + "\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}");
  many += "}";
  with_length(many.size(), many + "1234");  // all share their bytes
}

TEST_F(LinksHostile, LedgersThatLeadElsewhere) {
  fs::create_directories(model() / ".emend" / "packs");
  const auto ledger_with = [&](const std::string& text) {
    write_file(model() / ".emend" / "ledger.json", text);
    expect_refused([&] { const editors::Ledger ledger(model()); }, ErrorClass::kCorruption, {"ledger.json"});
    expect_refused([&] { (void)editors::has_runtime_edits(model()); }, ErrorClass::kCorruption, {"ledger.json"});
  };
  const auto entry = [](const std::string& id) {
    return nlohmann::json{{"version", 1},
                          {"base", std::string(64, '0')},
                          {"active", {id}},
                          {"packs",
                           {{id,
                             {{"editor", "memit"},
                              {"facts", 1},
                              {"subjects", nlohmann::json::array()},
                              {"weights", nlohmann::json::array()},
                              {"applied_at", ""},
                              {"runtime", true}}}}}}
        .dump();
  };
  for (const char* id : {"../../../secret", "/etc/passwd", "", "0123456789a", "0123456789AB", "0123456789abc"})
    ledger_with(entry(id));
  ledger_with("[]");
  ledger_with("{");
  ledger_with(R"({"version": 1, "base": 7, "active": [], "packs": {}})");
  ledger_with(R"({"version": 1, "base": "x", "active": ["0123456789ab"], "packs": {}})");
  fs::remove_all(model() / ".emend");
  fs::create_directory_symlink(root_, model() / ".emend");  // changes would be written there
  expect_refused([&] { const editors::Ledger ledger(model()); }, ErrorClass::kInvalidArgument, {".emend", "link"});
}

}  // namespace links_hostile_test
}  // namespace emend

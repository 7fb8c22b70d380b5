// Documents made to exhaust or confuse their readers: JSON nested without end, keys that stand twice, shapes whose
// strides overflow, pack manifests with other types than emend writes. Each ends in an error that says where.
#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/core/json.h>
#include <emend/core/npz.h>
#include <emend/core/safetensors.h>
#include <emend/devices/device_map.h>
#include <emend/editors/packs/import_deltas.h>
#include <emend/editors/packs/pack.h>
#include <emend/evaluation/report.h>
#include <gtest/gtest.h>
#include <minizip/zip.h>

#include "support/error_of.h"
#include "support/temporary_folder.h"
#include "support/tiny_model.h"

namespace emend {
namespace {

namespace fs = std::filesystem;

constexpr int kDeep = 100'000;
const std::string kNested = std::string(kDeep, '[') + std::string(kDeep, ']');

using testing::expect_refused;

class DocumentsHostile : public ::testing::Test {
 protected:
  // A safetensors file with this header and no data.
  [[nodiscard]] fs::path tensors(const std::string& header) const {
    const uint64_t length = header.size();
    write_file(root_ / "x.safetensors", std::string(reinterpret_cast<const char*>(&length), 8) + header);
    return root_ / "x.safetensors";
  }
  // An archive of one array, "x", with this header and no data.
  [[nodiscard]] fs::path archive(std::string header) const {
    header += '\n';
    const std::string begin = {'\x93', 'N', 'U', 'M', 'P', 'Y', 1, 0, static_cast<char>(header.size()), 0};
    const std::string bytes = begin + header;
    const zipFile zip = zipOpen64((root_ / "x.npz").c_str(), APPEND_STATUS_CREATE);
    zip_fileinfo info{};
    zipOpenNewFileInZip(zip, "x.npy", &info, nullptr, 0, nullptr, 0, nullptr, Z_DEFLATED, Z_DEFAULT_COMPRESSION);
    zipWriteInFileInZip(zip, bytes.data(), static_cast<unsigned>(bytes.size()));
    zipCloseFileInZip(zip);
    zipClose(zip, nullptr);
    return root_ / "x.npz";
  }

  const testing::TemporaryFolder folder_{"documents"};
  const fs::path root_ = folder_.path();
};

TEST_F(DocumentsHostile, NestingEndsInAnErrorEverywhere) {
  expect_refused([] { (void)parse_json(kNested, "x.json"); }, ErrorClass::kCorruption,
                 {"x.json:1:101: ", "nesting of more than 100 levels"});
  const std::string keys = testing::repeat("{\"a\":\n", kDeep);
  expect_refused([&] { (void)parse_json(keys, "x.json"); }, ErrorClass::kCorruption, {"x.json:101:1: "});
  expect_refused([] { (void)devices::parse_device_map("{\"model\": " + kNested + "}"); }, ErrorClass::kInvalidArgument,
                 {"nesting of more than 64 levels"});
  for (const char* name : {"map.json", "map.yaml"}) {
    write_file(root_ / name, std::string(name) == "map.json" ? "{\"model\": " + kNested + "}" : "model: " + kNested);
    expect_refused([&] { (void)devices::parse_device_map((root_ / name).string()); }, ErrorClass::kInvalidArgument,
                   {std::string(name) + ":1", "nesting of more than 64 levels"});
  }
  for (const char* name : {"results.json", "report.json", "cases.jsonl"}) {
    fs::create_directories(root_ / "run");
    write_file(root_ / "run" / "results.json", R"({"schema": 1})");
    write_file(root_ / "run" / name, "{\"metrics\": " + kNested + "}");
    expect_refused([&] { (void)evaluation::load_run(root_ / "run"); }, ErrorClass::kCorruption, {name, "nesting"});
    fs::remove_all(root_ / "run");
  }
  testing::write_tiny_model(root_ / "model");
  const auto model = models::load_model((root_ / "model").string());
  fs::create_directories(root_ / "adapter");
  for (const char* field : {"peft_type", "alpha_pattern", "bias", "r"}) {
    write_file(root_ / "adapter" / "adapter_config.json", "{\"" + std::string(field) + "\": " + kNested + "}");
    expect_refused([&] { (void)editors::import_deltas(root_ / "adapter", model); }, ErrorClass::kCorruption,
                   {"adapter_config.json:1:", "nesting"});
  }
}

TEST_F(DocumentsHostile, FaultsAreToldWithLineAndColumn) {
  const auto refused = [](const std::string& text, const std::vector<std::string>& words) {
    expect_refused([&] { (void)parse_json(text, "x.json"); }, ErrorClass::kCorruption, words);
  };
  refused("", {"x.json:1:1: ", "syntax error"});
  refused("\xFF\xFE{", {"x.json: UTF-16", "save the file as UTF-8"});
  refused("{\n \"a\": nope}", {"x.json:2:", "syntax error"});
  refused("{\"a\": 1,\n  \"a\": 2}", {"x.json:2:5: ", "\"a\" is given twice"});
  refused("{\"a\": 1e999}", {"x.json:1:", "number overflow"});
  refused("[1] 2", {"x.json:1:5: "});
  refused("\"\xff\"", {"x.json:1:2: "});
  EXPECT_EQ(parse_json("\xEF\xBB\xBF[{\"a\": [1, -2, 0.5, true, null, \"\\u00e9\"]}, []]", "x.json").dump(),
            "[{\"a\":[1,-2,0.5,true,null,\"é\"]},[]]");
  EXPECT_EQ(parse_json("{\"a\": {\"b\": 1}, \"a\": [2]}", "x.json", {.repeated_keys = true}).dump(), "{\"a\":[2]}");
  write_file(root_ / "big.json", "[" + std::string(2000, ' ') + "]");
  expect_refused([&] { (void)read_json(root_ / "big.json", {.max_bytes = 1000}); }, ErrorClass::kCorruption,
                 {"big.json: 2002 bytes", "at most 1000"});
}

TEST_F(DocumentsHostile, ShapesWhoseStridesOverflow) {
  const std::string huge = std::to_string(int64_t{1} << 61);
  for (const std::string& shape : {"[0, " + huge + ", " + huge + "]", "[" + huge + ", 0, " + huge + "]"}) {
    const auto path = tensors("{\"t\": {\"dtype\": \"F32\", \"shape\": " + shape + ", \"data_offsets\": [0, 0]}}");
    expect_refused([&] { (void)SafetensorsFile(path); }, ErrorClass::kCorruption,
                   {"x.safetensors", "\"t\"", "overflows"});
  }
  const auto path =
      archive("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 99999999999999999, 999999999999), }");
  expect_refused([&] { (void)NpzFile(path).read("x"); }, ErrorClass::kCorruption, {"x.npz", "overflows"});
  const auto empty = archive("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 3), }");
  EXPECT_EQ(NpzFile(empty).read("x").sizes(), (std::vector<int64_t>{0, 3}));
}

TEST_F(DocumentsHostile, PackManifestsOfOtherTypes) {
  editors::EditPack pack;
  pack.base_fingerprint = std::string(64, 'a');
  pack.editor = "memit";
  pack.hparams = nlohmann::json::object();
  pack.extra = nlohmann::json::object();
  pack.facts = nlohmann::json::array({{{"case_id", 1}, {"prompt", "{} is"}, {"subject", "A"}, {"target_new", "B"}}});
  editors::save_pack(root_ / "good.safetensors", pack);
  EXPECT_NO_THROW((void)editors::load_pack(root_ / "good.safetensors"));
  const SafetensorsFile good(root_ / "good.safetensors");
  const auto refused = [&](const std::function<void(nlohmann::json&)>& change, const std::string& word) {
    auto metadata = good.metadata();
    auto manifest = nlohmann::json::parse(metadata.at("manifest"));
    change(manifest);
    metadata["manifest"] = manifest.dump();
    write_safetensors(root_ / "bad.safetensors", {}, metadata);
    expect_refused([&] { (void)editors::load_pack(root_ / "bad.safetensors"); }, ErrorClass::kCorruption,
                   {"bad.safetensors", word});
  };
  for (const char* key : {"prompt", "subject", "target_new", "target_true", "relation_id"})
    for (const nlohmann::json& value :
         {nlohmann::json(7), nlohmann::json(nullptr), nlohmann::json::array({"A"}), nlohmann::json::object()})
      refused([&](auto& manifest) { manifest["facts"][0][key] = value; }, std::string("a fact whose ") + key);
  refused([](auto& manifest) { manifest["facts"][0]["case_id"] = "x"; }, "case_id");
  refused([](auto& manifest) { manifest["facts"][0] = "A"; }, "list of objects");
  refused([](auto& manifest) { manifest["facts"] = 5; }, "no list");
  refused([](auto& manifest) { manifest["extra"] = "text"; }, "extra");
  refused([](auto& manifest) { manifest["editor"] = 5; }, "manifest");
}

}  // namespace
}  // namespace emend

#include <emend/devices/placement.h>
#include <emend/devices/units.h>
#include <gtest/gtest.h>

#include "support/error_of.h"

namespace emend::devices {
namespace device_units_test {

using testing::error_of, testing::expect_error;

std::string refusal(const std::string& text) {
  SCOPED_TRACE("\"" + text + "\"");
  return error_of([&] { (void)parse_bytes(text, "here"); }, ErrorClass::kInvalidArgument);
}

TEST(ParseBytes, ReadsBothKindsOfUnits) {
  EXPECT_EQ(parse_bytes("10GiB", ""), 10LL << 30);
  EXPECT_EQ(parse_bytes("10GB", ""), 10'000'000'000LL);
  EXPECT_EQ(parse_bytes("512MiB", ""), 512LL << 20);
  EXPECT_EQ(parse_bytes("3KB", ""), 3000);
  EXPECT_EQ(parse_bytes("3KiB", ""), 3072);
  EXPECT_EQ(parse_bytes("1.5TiB", ""), 3LL << 39);
  EXPECT_EQ(parse_bytes("2TB", ""), 2'000'000'000'000LL);
  EXPECT_EQ(parse_bytes("1048576", ""), 1048576);
  EXPECT_EQ(parse_bytes("7B", ""), 7);
  EXPECT_EQ(parse_bytes("10 GiB", ""), 10LL << 30);
  EXPECT_EQ(parse_bytes("10gib", ""), 10LL << 30);
  EXPECT_EQ(parse_bytes("10gB", ""), 10'000'000'000LL);
  EXPECT_EQ(parse_bytes("0", ""), 0);
}

TEST(ParseBytes, RefusesTrapsWithAReason) {
  EXPECT_NE(refusal("10Gb").find("bits"), std::string::npos);
  EXPECT_NE(refusal("10gb").find("bits"), std::string::npos);
  EXPECT_NE(refusal("10G").find("10GiB (powers of 1024) or 10GB"), std::string::npos);
  EXPECT_NE(refusal("10Gi").find("say which"), std::string::npos);
  EXPECT_NE(refusal("-1GiB").find("negative"), std::string::npos);
  EXPECT_EQ(refusal("x").rfind("here: \"x\" is not a size", 0), 0U);
  for (const char* text : {"", "GiB", "10XB", "10GiBs", "nan", "inf", "1e30GiB", "10b", "1.5", "10 20GiB", "10,5GiB"})
    (void)refusal(text);
}

TEST(FormatBytes, IsShort) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(3LL << 29), "1.5 GiB");
  EXPECT_EQ(format_bytes(-2048), "-2.0 KiB");
}

TEST(MaxMemory, ReadsEntries) {
  const auto limits = parse_max_memory("0=10GiB, cuda:3=1GB,cpu=30GiB");
  ASSERT_EQ(limits.limits.size(), 3U);
  EXPECT_EQ(limits.of(c10::Device(c10::kCUDA, 0)), 10LL << 30);
  EXPECT_EQ(limits.of(c10::Device(c10::kCUDA, 3)), 1'000'000'000LL);
  EXPECT_EQ(limits.of(c10::Device(c10::kCPU)), 30LL << 30);
  EXPECT_EQ(limits.of(c10::Device(c10::kCUDA, 1)), std::nullopt);
  EXPECT_EQ(parse_max_memory("1=5MB", kSimulated).of(c10::Device(kSimulated, 1)), 5'000'000);
  EXPECT_EQ(parse_max_memory("sim:1=5MB").of(c10::Device(kSimulated, 1)), 5'000'000);
}

TEST(MaxMemory, RefusesBadEntries) {
  for (const char* text : {"", "10GiB", "0=", "=1GiB", "0=10Gb", "gpu0=1GiB", "0=1GiB,0=2GiB", "0=1GiB,cuda:0=2GiB",
                           "0=1GiB,,1=1GiB", "0=1GiB,"}) {
    SCOPED_TRACE(text);
    expect_error(ErrorClass::kInvalidArgument, {}, [&] { (void)parse_max_memory(text); });
  }
  expect_error(ErrorClass::kUnsupported, {}, [] { (void)parse_max_memory("disk=1GiB"); });
}

}  // namespace device_units_test
}  // namespace emend::devices

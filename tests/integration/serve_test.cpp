// `emend serve` from outside: serve_client.py drives it with OpenAI's client and as strangers and accidents would.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "support/program_fixture.h"
#include "support/python.h"

namespace serve_test {

class Serve : public emend::testing::ProgramTest {
 protected:
  void drive(const std::string& what, const std::string& script = "serve_client.py") {
    std::string command = "OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 " + emend::testing::test_python().string() +
                          " " EMEND_SOURCE_DIR "/tests/integration/" + script + " " + what;
    for (const auto& part : {emend::testing::program_path("emend").string(), path("model"), path("hparams.yaml"),
                             path("corpus.txt"), path("scratch")})
      command += " " + part;
    const auto result = emend::testing::run_shell("timeout 280 env " + command);
    EXPECT_EQ(result.status, 0) << result.output;
    EXPECT_NE(result.output.find("OK\n"), std::string::npos) << result.output;
  }
};

TEST_F(Serve, AnswersOpenAisClientAsGenerateDoesForEverySetOfPacks) {
  EMEND_NEEDS_PYTHON();
  drive("openai");
}

TEST_F(Serve, EditsAreJobsAndPacksAreSwitchedMovedTakenAndFetched) {
  EMEND_NEEDS_PYTHON();
  drive("packs");
}

TEST_F(Serve, WhatOthersKeepInTheFolderStays) {
  EMEND_NEEDS_PYTHON();
  drive("foreign");
}

TEST_F(Serve, ADirectionIsAPackWithAStrength) {
  EMEND_NEEDS_PYTHON();
  drive("directions");
}

TEST_F(Serve, StrangersGetNothingAndStopNobody) {
  EMEND_NEEDS_PYTHON();
  drive("strangers");
}

TEST_F(Serve, AfterAKillThePacksInForceAreThoseFromBeforeOrAfter) {
  EMEND_NEEDS_PYTHON();
  drive("killed");
}

// In an address space that holds the model and the stacks of a few threads, but not those of 4096.
TEST_F(Serve, ThreadsThatCannotStartAreStatus5) {
  const std::string serve = emend::testing::program_path("emend").string() + " serve --port 0 --model " +
                            path("model") + " --packs " + path("packs") + " --connections ";
  const std::string measure = serve + "2 > " + path("out") + " & pid=$!; until grep -q listening " + path("out") +
                              "; do kill -0 $pid || exit 9; sleep 0.1; done; "
                              "peak=$(awk '/VmPeak/ {print $2}' /proc/$pid/status); kill $pid; wait $pid; ";
  const auto result = emend::testing::run_program(
      "/bin/sh", {"-c", measure + "ulimit -s 8192; ulimit -v $((peak + 1048576)); exec " + serve + "4096"});
  expect_ended(result, 5, {"ulimit -a"});
  EXPECT_EQ(result.out, "") << "it was not ready";
}

TEST_F(Serve, AnAddressThatCannotBeHadIsKnownBeforeAModelIsLoaded) {
  const int busy = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  ASSERT_EQ(::bind(busy, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(busy, 1), 0);
  ASSERT_EQ(::getsockname(busy, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string port = std::to_string(ntohs(address.sin_port));
  const auto result = emend::testing::run_program("emend", {"serve", "--model", path("model"), "--port", port});
  ::close(busy);
  expect_ended(result, 3, {"127.0.0.1:" + port + ": the address cannot be listened on"});
  EXPECT_EQ(result.err.find("loaded "), std::string::npos) << result.err;
}

TEST_F(Serve, ABrowserWalksTheWholeRoad) {
  EMEND_NEEDS_PYTHON();
  const char* named = std::getenv("EMEND_CHROMIUM");
  const std::string browser = named ? named : "/usr/bin/chromium";
  if (!std::filesystem::exists(browser)) GTEST_SKIP() << "needs Chromium in /usr/bin or EMEND_CHROMIUM";
  drive(browser, "serve_browser.py");
}

}  // namespace serve_test

// `emend serve` from outside: serve_client.py drives it with OpenAI's client and as strangers and accidents would.
#include <gtest/gtest.h>

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

TEST_F(Serve, ABrowserWalksTheWholeRoad) {
  EMEND_NEEDS_PYTHON();
  const char* named = std::getenv("EMEND_CHROMIUM");
  const std::string browser = named ? named : "/usr/bin/chromium";
  if (!std::filesystem::exists(browser)) GTEST_SKIP() << "needs Chromium in /usr/bin or EMEND_CHROMIUM";
  drive(browser, "serve_browser.py");
}

}  // namespace serve_test

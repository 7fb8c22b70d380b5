#include "programs.h"

int main(int argc, char** argv) {
  return emend::tools::run_emend(argc, argv);
}

#include "programs.h"

int main(int argc, char** argv) {
  return emend::tools::run_memit_edit(argc, argv);
}

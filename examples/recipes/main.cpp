// recipes NAME MODEL [HPARAMS]: runs one recipe; HPARAMS is for those that edit.
#include <emend/core/error.h>

#include "recipe.h"

int main(int argc, char** argv) try {
  const std::string name = argc > 2 ? argv[1] : "";
  std::cout << std::fixed << std::setprecision(2);
#define RUN_RECIPE(recipe) \
  if (name == #recipe) return recipe(argv[2], argc > 3 ? argv[3] : ""), 0;
  RECIPES(RUN_RECIPE)
#define LIST_RECIPE(recipe) " " #recipe
  return std::cerr << "usage: recipes NAME MODEL [HPARAMS], NAME one of" RECIPES(LIST_RECIPE) "\n", 2;
} catch (const emend::Error& error) {
  std::cerr << error.what() << "\n";
  return emend::exit_code(error.error_class());
}

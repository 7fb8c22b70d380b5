// The smallest use of the library: writes a tensor to a safetensors file, reads it back, and shows how errors arrive.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/core/safetensors.h>

#include <filesystem>
#include <iostream>

int main() try {
  const auto path = std::filesystem::temp_directory_path() / "emend_minimal.safetensors";
  emend::write_safetensors(path, {{"weight", at::ones({2, 3})}});
  const auto weight = emend::SafetensorsFile(path).tensor("weight");
  std::cout << "wrote and read back " << weight.size(0) << " x " << weight.size(1) << "\n";
  std::filesystem::remove(path);
  return 0;
} catch (const emend::Error& error) {
  std::cerr << error.what() << "\n";
  return emend::exit_code(error.error_class());
}

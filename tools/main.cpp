#include "tools/command.hpp"

int main(int argc, char** argv) { return kvlab::kvlab_main(argc, argv); }

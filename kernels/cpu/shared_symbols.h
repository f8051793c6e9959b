// Declares functions of the common library that the libraries of the levels call.
#pragma once

#define SHARED __attribute__((visibility("default")))

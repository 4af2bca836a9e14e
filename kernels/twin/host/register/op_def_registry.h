// Stands in for the header of this name on a machine without CANN.
#pragma once

#include "../registry.h"

// NVRTC brings what is in here by itself.
#pragma once

/* Stands in for Hadoop's libhdfs: what pyarrow and we call of it, on a directory named by STAND_IN_HDFS_ROOT.
 *
 * As in HDFS, a file is renamed at once or not at all, and never onto another one; a file that is written has its
 * parents; what is not there cannot be listed (ENOENT) nor deleted (EIO); listed names are URLs with their host.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct {
    int kind; /* 'F' or 'D' */
    char *name;
    time_t modified;
    int64_t size;
    short replication;
    int64_t block_size;
    char *owner, *group;
    short permissions;
    time_t accessed;
} info;

static char authority[256]; /* as hdfs://namenode:8020 */

static char *local(char *place, const char *path) {
    snprintf(place, PATH_MAX, "%s%s", getenv("STAND_IN_HDFS_ROOT"), path);
    return place;
}

static void make_parents(const char *path) {
    char place[PATH_MAX];
    strcpy(place, path);
    for (char *slash = strchr(place + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(place, 0777);
        *slash = '/';
    }
}

/* Connections */

void *hdfsNewBuilder(void) { return calloc(1, 1); }
void hdfsBuilderSetNameNode(void *builder, const char *host) { snprintf(authority, sizeof authority, "%s", host); }
void hdfsBuilderSetNameNodePort(void *builder, uint16_t port) {
    if (port) snprintf(strchr(authority, 0), 8, ":%d", port);
}
void hdfsBuilderSetUserName(void *builder, const char *name) {}
void hdfsBuilderSetKerbTicketCachePath(void *builder, const char *path) {}
void hdfsBuilderSetForceNewInstance(void *builder) {}
int hdfsBuilderConfSetStr(void *builder, const char *name, const char *value) { return 0; }
void *hdfsBuilderConnect(void *builder) {
    struct stat found;
    char *root = getenv("STAND_IN_HDFS_ROOT");
    free(builder);
    if (strstr(authority, "//nowhere") || !root || stat(root, &found)) {
        errno = 255; /* what libhdfs says of an exception that it does not know */
        return NULL;
    }
    return authority;
}
int hdfsDisconnect(void *fs) { return 0; }

/* Names */

static void describe(info *into, const char *path, const struct stat *found) {
    memset(into, 0, sizeof *into);
    into->kind = S_ISDIR(found->st_mode) ? 'D' : 'F';
    if (asprintf(&into->name, "%s%s", authority, path) < 0) abort();
    into->modified = found->st_mtime;
    into->size = found->st_size;
    into->owner = strdup("owner");
    into->group = strdup("group");
}

void hdfsFreeFileInfo(info *them, int count) {
    for (int each = 0; each < count; each++) {
        free(them[each].name);
        free(them[each].owner);
        free(them[each].group);
    }
    free(them);
}

info *hdfsGetPathInfo(void *fs, const char *path) {
    char place[PATH_MAX];
    struct stat found;
    if (stat(local(place, path), &found)) return NULL;
    info *one = malloc(sizeof *one);
    describe(one, path, &found);
    return one;
}

int hdfsExists(void *fs, const char *path) {
    char place[PATH_MAX];
    return access(local(place, path), F_OK);
}

info *hdfsListDirectory(void *fs, const char *path, int *count) {
    char place[PATH_MAX], inside[PATH_MAX];
    struct dirent *entry;
    struct stat found;
    info *them = NULL;
    *count = 0;
    DIR *folder = opendir(local(place, path));
    if (!folder) return NULL;
    while ((entry = readdir(folder))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (snprintf(inside, sizeof inside, "%s/%s", path, entry->d_name) < 0) abort();
        if (stat(local(place, inside), &found)) continue; /* deleted meanwhile */
        them = realloc(them, (*count + 1) * sizeof *them);
        describe(&them[(*count)++], inside, &found);
    }
    closedir(folder);
    errno = 0;
    return them;
}

int hdfsCreateDirectory(void *fs, const char *path) {
    char place[PATH_MAX];
    make_parents(local(place, path));
    return mkdir(place, 0777) && errno != EEXIST ? -1 : 0;
}

int hdfsDelete(void *fs, const char *path, int recursive) {
    char place[PATH_MAX];
    if (!unlink(local(place, path))) return 0;
    errno = EIO;
    return -1;
}

int hdfsRename(void *fs, const char *from, const char *to) {
    char before[PATH_MAX], after[PATH_MAX];
    if (link(local(before, from), local(after, to))) {
        errno = EIO;
        return -1;
    }
    return unlink(before);
}

char *hdfsGetWorkingDirectory(void *fs, char *buffer, size_t size) {
    snprintf(buffer, size, "%s/user/somebody", authority);
    return buffer;
}

int64_t hdfsGetCapacity(void *fs) { return 0; }
int64_t hdfsGetUsed(void *fs) { return 0; }
int hdfsChown(void *fs, const char *path, const char *owner, const char *group) { return 0; }
int hdfsChmod(void *fs, const char *path, short mode) { return 0; }

/* Open files, each a descriptor of one more */

#define DESCRIPTOR(file) ((int)(intptr_t)(file) - 1)

void *hdfsOpenFile(void *fs, const char *path, int flags, int buffer, short replication, int32_t block) {
    char place[PATH_MAX];
    local(place, path);
    if (flags & O_WRONLY) make_parents(place);
    int file = open(place, flags & O_WRONLY ? O_WRONLY | O_CREAT | O_TRUNC : O_RDONLY, 0666);
    return (void *)(intptr_t)(file + 1);
}
int hdfsCloseFile(void *fs, void *file) { return close(DESCRIPTOR(file)); }
int32_t hdfsRead(void *fs, void *file, void *into, int32_t length) { return read(DESCRIPTOR(file), into, length); }
int32_t hdfsPread(void *fs, void *file, int64_t from, void *into, int32_t length) {
    return pread(DESCRIPTOR(file), into, length, from);
}
int32_t hdfsWrite(void *fs, void *file, const void *from, int32_t length) {
    return write(DESCRIPTOR(file), from, length);
}
int hdfsSeek(void *fs, void *file, int64_t to) { return lseek(DESCRIPTOR(file), to, SEEK_SET) < 0 ? -1 : 0; }
int64_t hdfsTell(void *fs, void *file) { return lseek(DESCRIPTOR(file), 0, SEEK_CUR); }
int hdfsFlush(void *fs, void *file) { return 0; }
